"""A stage for real agents: a small supervisor on loopback that a test plays by hand, and proof of what is alive.

Everything but the supervisor is real: the agent process, its guardian, launcher, ranks, pages and sockets.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.processes import Process, carrying, descendants, is_alive, look, send_signal
from slurm_resilience.runtime.wire import Connection

M = TypeVar("M", bound=m.Message)

# A deadline costs only when it fails: a busy machine gets what it needs.
PATIENCE_S = 90.0
# Silence is no alarm where a test is not about it: this process may be held up for seconds on a busy machine.
NO_ALARM = {"agent_silence_s": 100.0, "node_silence_s": 200.0}


class Peer:
    """One agent's connection as this supervisor sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self.connection = Connection(sock)
        self.hello: m.Hello | None = None
        self.heard: list[m.Message] = []
        self.mute = False  # hears, and answers nothing

    def of(self, kind: type[M], **fields: Any) -> list[M]:
        """Messages of one kind with these fields."""
        found = [message for message in self.heard if isinstance(message, kind)]
        return [message for message in found if all(getattr(message, name) == value for name, value in fields.items())]

    def send(self, message: m.Message) -> None:
        self.connection.send(message)


class Stage:
    """A run folder, a listening supervisor and agents; everything is ended with the ``with`` block."""

    def __init__(
        self, run_dir: Path, *, argv: list[str] | None = None, job_id: str = "7", restart: int = 0, **config: Any
    ) -> None:
        self.run_dir = run_dir
        self.run_id = f"t{os.getpid()}-{time.monotonic_ns()}"
        self.argv = argv or [sys.executable, "train.py"]
        self.job_id, self.restart = job_id, restart
        self.token = "secret"
        self.epoch = 0
        run_dir.mkdir(exist_ok=True)
        config["limits"] = {**NO_ALARM, **config.get("limits", {})}
        values = ResilienceConfig.build({"preload": [], **config}).model_dump(mode="json")
        run = {"v": 1, "run_id": self.run_id, "created": 0, "argv": self.argv, "config": values}
        (run_dir / "run.json").write_text(json.dumps(run))
        self.agents: list[subprocess.Popen[bytes]] = []
        self.peers: list[Peer] = []
        self.beat_every_s = m.BEAT_EVERY_S
        self.listen()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                for process in descendants(agent.pid):
                    send_signal(process, signal.SIGKILL)
                agent.kill()
            agent.wait()
        for process in carrying({"RESILIENCE_RUN_ID": self.run_id}):
            send_signal(process, signal.SIGKILL)
        self.hang_up()
        if error is not None:
            for log in sorted(self.run_dir.glob("logs/**/*.log")):
                print(f"--- {log.relative_to(self.run_dir)}\n{log.read_text(errors='replace')[-6000:]}")
            for peer in self.peers:
                print(f"--- heard from {peer.hello and peer.hello.node}")
                for message in peer.heard:
                    if not isinstance(message, m.Beat):
                        print(message)

    # --- the supervisor -----------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Start a supervisor: publish the address, accept whoever comes."""
        self.epoch += 1
        self.server: socket.socket | None = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        port = self.server.getsockname()[1]
        SupervisorAddress(self.epoch, "127.0.0.1", port, self.token, os.getpid(), "", self.job_id, self.restart).write(
            self.run_dir
        )

    def hang_up(self) -> None:
        """The supervisor dies: every socket is closed."""
        if self.server is not None:
            self.server.close()
            self.server = None
        for peer in self.peers:
            peer.connection.close()

    def start(self, node: str = "node1", **environment: str) -> subprocess.Popen[bytes]:
        """Start an agent process (its guardian, to be exact)."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RESILIENCE_"))}
        agent = subprocess.Popen(
            [sys.executable, "-m", "slurm_resilience.runtime.agent", "--run-dir", str(self.run_dir), "--node", node],
            env={**env, **environment}, stdin=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        self.agents.append(agent)
        return agent

    def pump(self, timeout_s: float = 0.02) -> None:
        """Accept, read, answer hellos and beats."""
        live = [peer for peer in self.peers if peer.connection.closed is None]
        sockets = [peer.connection for peer in live]
        readable, _, _ = select.select([*([self.server] if self.server else []), *sockets], [], [], timeout_s)
        if self.server in readable and self.server is not None:
            self.peers.append(Peer(self.server.accept()[0]))
        for peer in live:
            peer.connection.flush()
            if peer.connection not in readable:
                continue
            for message in peer.connection.receive():
                peer.heard.append(message)
                if isinstance(message, m.Hello) and message.proves(self.token):
                    peer.hello = message
                    peer.send(m.Welcome.build(self.token, message, beat_every_s=self.beat_every_s))
                elif isinstance(message, m.Beat) and not peer.mute:
                    peer.send(m.Ping(peer.connection.seen))

    def until(self, condition: Callable[[], Any], within_s: float = PATIENCE_S, what: str = "") -> Any:
        """Pump until the condition gives something; its value.  Fails after the deadline."""
        deadline = time.monotonic() + within_s
        while True:
            value = condition()
            if value:
                return value
            assert time.monotonic() < deadline, f"not within {within_s} s: {what or condition}"
            self.pump()

    def still(self, seconds: float, condition: Callable[[], Any]) -> None:
        """Pump that long, while the condition has to hold all the time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert condition()
            self.pump()

    # --- agents -------------------------------------------------------------------------------------------------------

    def join(self, node: str = "node1", *, warm: bool = True, **environment: str) -> Peer:
        """Start an agent and wait until it is there, and its launcher has made up its mind."""
        self.start(node, **environment)
        peer = self.until(lambda: self.peer(node), what=f"{node} joins")
        if warm:
            self.until(lambda: peer.of(m.Warm, usable=True), what=f"{node} is warm")
        return peer

    def peer(self, node: str = "node1", after: Peer | None = None) -> Peer | None:
        """The newest welcomed connection of a node, if it is newer than ``after``."""
        found = [peer for peer in self.peers if peer.hello is not None and peer.hello.node == node]
        return found[-1] if found and found[-1] is not after else None

    def launch(self, peer: Peer, attempt: int, ranks: int = 1, *, first: int = 0, world: int = 0, **more: Any) -> m.Launch:
        """Send a launch of ``ranks`` ranks."""
        world = world or ranks
        values: dict[str, Any] = {
            "attempt": attempt, "world": world, "ranks": [[first + n, n] for n in range(ranks)], "group_rank": 0, "groups": 1,
            "master_addr": "127.0.0.1", "master_port": 1, "argv": self.argv, "cwd": str(self.run_dir), "env": {},
            "checkpoints": str(self.run_dir / "checkpoints"), "settings": {"seed": 0}, "plan": {"ranks": world},
        }  # fmt: skip
        message = m.Launch(**{**values, **more})
        peer.send(message)
        return message

    def started(self, peer: Peer, attempt: int) -> list[Process]:
        """The ranks' processes, once they have been launched."""
        launched = self.until(lambda: peer.of(m.Launched, attempt=attempt), what=f"attempt {attempt} launched")[0]
        return [found for pid in launched.pids.values() if (found := look(pid)) is not None]

    def log(self, attempt: int, rank: int = 0) -> str:
        """What a rank has printed so far."""
        path = self.run_dir / "logs" / f"attempt-{attempt:04d}" / f"rank-{rank:05d}.log"
        return path.read_text() if path.exists() else ""

    def script(self, text: str, name: str = "train.py") -> Path:
        """Write the user's program into the run folder."""
        path = self.run_dir / name
        path.write_text(text)
        return path

    def alive(self) -> list[Process]:
        """Every living process of this run: what the agents have under them, and what carries the run's id."""
        found = {process.pid: process for process in carrying({"RESILIENCE_RUN_ID": self.run_id})}
        for agent in self.agents:
            found.update((process.pid, process) for process in descendants(agent.pid))
        return [process for process in found.values() if is_alive(process)]
