"""10,000 simulated agents against one real supervisor, on loopback: what it costs, and whether it still sees in time.

    python tests/benchmarks/scale.py [--agents 10000] [--json FILE]

The supervisor is the real one (sockets, coordinator, events), in a process of its own, which never uses more than one core.
The agents are connections of a second process: they greet, beat with the progress of one rank, launch, die and stop as they are
told, and dial again when they are turned away; the supervisor tells them how often to beat.  With ``--pin`` the supervisor is
held to the last core and the agents to the others, for a machine on which nothing else runs.  Figures:

    detect_p50_s, detect_p99_s   from the last beat of an agent that falls silent until its ``agent_lost`` (limit: 4 s)
    stop_p50_s, stop_p99_s       from that decision until an agent has the order to stop, over all agents
    relaunch_s                   from the decision until the last agent has its ranks of the next attempt to launch
    cores                        CPU seconds a second of the supervisor while all is well
    rss_bytes                    its memory
    join_s                       from the first connection until the first attempt is launched everywhere
    launch_bytes                 the longest order to launch that an agent got
"""

from __future__ import annotations

import heapq
import math
import os
import random
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from slurm_resilience.observe.events import FILE_NAME, parse
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.address import SupervisorAddress
from tests.benchmarks import record

STEADY_S, JOIN_S, TRIAL_S = 20.0, 240.0, 90.0
REDIAL_S = (0.2, 1.0)
TURNS, MOST_DIALLING = 50, 200
PING = b'{"m":"ping"'
# Shorter than any order but ``store``, which goes to one of the first nodes; longer than a ping.
ORDER_BYTES, SOME = 48, 100
SILENT_AT_ONCE = 20


# --- the supervisor's process -----------------------------------------------------------------------------------------


def serve(folder: Path, agents: int) -> int:
    """Be the supervisor of so many nodes, none of which it starts."""
    import ctypes
    import signal

    from slurm_resilience.config import ResilienceConfig
    from slurm_resilience.runtime.backend import Ended
    from slurm_resilience.runtime.run_folder import RunFolder
    from slurm_resilience.runtime.spec import RunSpec
    from slurm_resilience.runtime.supervisor import Supervisor

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the benchmark, however that ends

    class Backend:
        """Agents come by themselves."""

        nodes = tuple(f"n{number}" for number in range(agents))

        def start(self, node: str) -> None:
            """Nothing is started."""

        def settled(self, node: str) -> None:
            """Nothing was."""

        def poll(self) -> list[Ended]:
            return []

        def close(self) -> None:
            """Nothing to give up."""

    config = ResilienceConfig.build(
        {"nodes": (max(1, agents // 2), agents), "budgets": {"node_lost": 100_000}, "limits": {"handshake_s": JOIN_S}}
    )
    where = RunFolder(folder)
    where.prepare()
    run_id = where.open_run(argv=["true"], config=config.model_dump(mode="json"))
    spec = RunSpec(
        ("true",), "/", {}, str(where.checkpoints), {}, job_id="local", restart=0, has_slurm=False, can_requeue=False
    )
    supervisor = Supervisor(
        where, run_id, config, spec, Backend(), host="127.0.0.1", errands=None, restarted=False, show=lambda _: None
    )
    return supervisor.run()


# --- the agents' process ----------------------------------------------------------------------------------------------


class SimulatedAgent:
    """One agent as the supervisor meets it on the wire."""

    def __init__(self, crowd: Crowd, node: str, number: int) -> None:
        self.crowd, self.node, self.number = crowd, node, number
        self.sock: socket.socket | None = None
        self.mute = self.welcome = False
        self.attempt, self.beats = 0, 0
        self.ranks: list[int] = []
        self.beat_at = self.killed_at = self.launched_at = 0.0
        self.launch_bytes = 0
        self._rest = b""

    def dial(self) -> None:
        """Begin to connect; :meth:`ready` is called when that is done."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Further source addresses of loopback, since one has not ports enough for all and for those in TIME_WAIT.
        sock.bind((f"127.0.{1 + self.number // 5000}.1", 0))
        sock.connect_ex((self.crowd.address.host, self.crowd.address.port))
        self.sock = sock
        self.crowd.watch(self, select.EPOLLOUT)

    def ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self.crowd.dialling -= 1
            if events & (select.EPOLLERR | select.EPOLLHUP):
                self.part()
                return
            self.crowd.watch(self, select.EPOLLIN)
            greeting = m.Hello.build(
                self.crowd.address.token, node=self.node, pid=os.getpid(), boot_id="b", job_id="local", restart=0,
                address="127.0.0.1", warm=True, cold_reason="", attempt=self.attempt if self.ranks else 0, ranks=self.ranks,
            )  # fmt: skip
            self.say(greeting.to_line())
        else:
            self.read()

    def part(self) -> None:
        """The connection is gone: dial again, unless silence is what is wanted."""
        if self.sock is not None:
            self.crowd.forget(self.sock)
            self.sock.close()
        self.sock, self._rest, self.welcome = None, b"", False
        if not self.mute:
            self.crowd.redials += 1
            self.crowd.dial_later(self)

    def read(self) -> None:
        """Whatever has come."""
        if self.sock is None:
            return
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.part()
            return
        if self.mute or (not self._rest and data.startswith(PING) and data.count(b"\n") == data.count(PING)):
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(PING):
                self.obey(m.parse(line), len(line))

    def obey(self, message: m.Message, size: int) -> None:
        match message:
            case m.Welcome():
                self.welcome, self.crowd.beat_every_s = True, message.beat_every_s
                if self.sock is not None and self.number >= SOME:
                    # A ping alone wakes nobody up: it is read with the next beat.  Orders are longer.
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, ORDER_BYTES)
            case m.Store(attempt):
                self.say(m.StoreReady(attempt, 1).to_line())
            case m.Launch(attempt=attempt, ranks=ranks):
                self.attempt, self.ranks, self.launched_at = attempt, [rank for rank, _ in ranks], time.time()
                self.launch_bytes = max(self.launch_bytes, size)
                self.say(m.Launched(attempt, {}, True, "", 0.01).to_line())
            case m.Kill(attempt):
                self.killed_at = time.time()
                for rank in self.ranks:
                    self.say(m.Exit(self.attempt, rank, -9, "SIGKILL", False, time.time(), [], 10).to_line())
                self.ranks = []
                self.say(m.Stopped(attempt, 1, 0.01, "kill").to_line())

    def beat(self) -> None:
        """What a beat of an agent with one rank that trains looks like, without the cost of the encoder."""
        if not self.welcome or self.mute:
            return
        self.read()
        self.beats += 1
        self.beat_at = time.time()
        ranks = b'"%d":[100,2,0.05,false,30.0,%d,[],0.1,50,0.0]' % (self.ranks[0], 100 + self.beats) if self.ranks else b""
        attempt = self.attempt if self.ranks else 0
        self.say(b'{"m":"beat","n":%d,"attempt":%d,"ranks":{%s}}\n' % (self.beats, attempt, ranks))

    def say(self, line: bytes) -> None:
        if self.sock is not None and not self.mute:
            try:
                self.sock.send(line)
            except BlockingIOError:
                sys.exit("scale.py: an agent's socket is full: the supervisor has not read for long")
            except OSError:
                self.part()


class Crowd:
    """All agents, in one loop."""

    def __init__(self, address: SupervisorAddress, count: int) -> None:
        self.address, self.beat_every_s = address, m.BEAT_EVERY_S
        self.redials = self.dialling = 0
        self.agents = [SimulatedAgent(self, f"n{number}", number) for number in range(count)]
        self._epoll = select.epoll()
        self._of_fd: dict[int, SimulatedAgent] = {}
        self._to_dial = [(0.0, number) for number in range(count)]
        self._turn, self._due = 0, time.monotonic()

    def watch(self, agent: SimulatedAgent, events: int) -> None:
        assert agent.sock is not None
        fd = agent.sock.fileno()
        (self._epoll.modify if fd in self._of_fd else self._epoll.register)(fd, events)
        self._of_fd[fd] = agent

    def forget(self, sock: socket.socket) -> None:
        self._epoll.unregister(sock.fileno())
        del self._of_fd[sock.fileno()]

    def dial_later(self, agent: SimulatedAgent) -> None:
        heapq.heappush(self._to_dial, (time.monotonic() + random.uniform(*REDIAL_S), agent.number))

    def turn(self) -> None:
        """Beat what is due, each agent as often as it was told, spread evenly; read what has come; go on dialling."""
        now = time.monotonic()
        while now >= self._due:
            for agent in self.agents[self._turn % TURNS :: TURNS]:
                agent.beat()
            self._turn += 1
            self._due += self.beat_every_s / TURNS
        while self._to_dial and self._to_dial[0][0] <= now and self.dialling < MOST_DIALLING:
            self.dialling += 1
            self.agents[heapq.heappop(self._to_dial)[1]].dial()
        for fd, events in self._epoll.poll(max(0.0, min(0.02, self._due - time.monotonic()))):
            found = self._of_fd.get(fd)
            if found is not None:
                found.ready(events)

    def alive(self) -> list[SimulatedAgent]:
        return [agent for agent in self.agents if not agent.mute]


class Bench:
    """The trials, seen from the agents' side and from the run's events."""

    crowd: Crowd

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder, self._pid = folder, pid
        self.detect: list[float] = []
        self.stop: list[float] = []
        self.relaunch: list[float] = []
        self.lost: dict[str, float] = {}
        self.losses = self._read_to = 0
        self._began = False

    def begin(self, crowd: Crowd) -> None:
        self.crowd, self._began = crowd, True

    def read_on(self) -> None:
        """Note who was lost, from what the file of events has grown by: reading all of it would cost the agents their beats."""
        with open(self.folder / FILE_NAME, "rb") as file:
            file.seek(self._read_to)
            grown = file.read()
        whole = grown[: grown.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.splitlines(keepends=True):
            event = parse(line) if b'"agent_lost"' in line else None
            if event is not None and event["event"] == "agent_lost":
                self.losses += 1
                self.lost.setdefault(str(event["node"]), float(event["t"]))

    def until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come within {within_s:g} s{self.state()}")
            self.rest(0.1)

    def rest(self, seconds: float) -> None:
        """The agents go on for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._began:
                self.crowd.turn()
            else:
                time.sleep(0.05)

    def state(self) -> str:
        """How far the agents are."""
        if not self._began:
            return ""
        ranks = sum(bool(agent.ranks) for agent in self.crowd.agents)
        newest = max(agent.attempt for agent in self.crowd.agents)
        there = sum(agent.welcome for agent in self.crowd.agents)
        lost = f"{self.losses} lost, {self.crowd.redials} dialled again"
        return f": {there} connected, {ranks} with ranks, attempt {newest}, {lost}"

    def launched(self, attempt: int) -> bool:
        return all(agent.attempt >= attempt for agent in self.crowd.alive())

    def spent_s(self) -> float:
        """CPU seconds of the supervisor so far."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self._pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def trial(self, silent: list[SimulatedAgent], spread_s: float) -> None:
        """These agents fall silent one by one; the rest is stopped and launched anew."""
        attempt = max(agent.attempt for agent in self.crowd.alive())
        since: dict[str, float] = {}
        for agent in silent:
            agent.mute = True
            since[agent.node] = agent.beat_at
            self.rest(spread_s / len(silent))

        def seen() -> bool:
            self.read_on()
            return since.keys() <= self.lost.keys() and self.launched(attempt + 1)

        self.until(seen, TRIAL_S, "The next attempt")
        decided = min(self.lost[node] for node in since)
        self.detect += [self.lost[node] - at for node, at in since.items()]
        self.stop += [agent.killed_at - decided for agent in self.crowd.alive()]
        self.relaunch.append(max(agent.launched_at for agent in self.crowd.alive()) - decided)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def measure(folder: Path, process: subprocess.Popen[bytes], args: Any) -> tuple[dict[str, float | None], dict[str, Any]]:
    found: list[SupervisorAddress] = []

    def there() -> bool:
        address = SupervisorAddress.read(folder)
        found[:] = [address] if address is not None else []
        return bool(found)

    bench = Bench(folder, process.pid)
    bench.until(there, 30.0, "The supervisor")
    bench.begin(Crowd(found[0], args.agents))
    clock = record.Clock()
    bench.until(lambda: all(agent.welcome for agent in bench.crowd.agents), JOIN_S, "The last agent")
    connected_s = clock.read()
    bench.until(lambda: bench.launched(1), JOIN_S, "The first attempt")
    join_s = clock.read()
    print(f"connected after {connected_s:.1f} s, launched after {join_s:.1f} s", file=sys.stderr, flush=True)
    bench.rest(5.0)
    spent, clock = bench.spent_s(), record.Clock()
    bench.rest(STEADY_S)
    cores = (bench.spent_s() - spent) / clock.read()
    print(f"{cores:.3f} cores", file=sys.stderr, flush=True)
    choose = random.Random(1)
    for number in range(args.trials):
        bench.trial(choose.sample(bench.crowd.alive(), SILENT_AT_ONCE), 1.0)
        so_far = f"detect p99 {percentile(bench.detect, 0.99):.2f} s, stop p99 {percentile(bench.stop, 0.99):.2f} s"
        print(f"trial {number}: {so_far}, relaunch {bench.relaunch[-1]:.2f} s", file=sys.stderr, flush=True)
        bench.rest(3.0)
    bench.read_on()
    rss = bench.rss_bytes()
    figures: dict[str, float | None] = {
        "agents": args.agents,
        "detect_p50_s": round(percentile(bench.detect, 0.5), 3),
        "detect_p99_s": round(percentile(bench.detect, 0.99), 3),
        "stop_p50_s": round(percentile(bench.stop, 0.5), 3),
        "stop_p99_s": round(percentile(bench.stop, 0.99), 3),
        "relaunch_s": round(record.median(bench.relaunch), 3),
        "cores": round(cores, 3),
        "rss_bytes": rss,
        "join_s": round(join_s, 3),
        "launch_bytes": max(agent.launch_bytes for agent in bench.crowd.agents),
    }
    false, redials = bench.losses - len(bench.detect), bench.crowd.redials
    return figures, {"silenced": len(bench.detect), "false_alarms": false, "redials": redials}


def main() -> None:
    options = record.parser(__doc__)
    options.add_argument("--agents", type=int, default=10_000, help="(default: 10000)")
    options.add_argument("--trials", type=int, default=5, help=f"times that {SILENT_AT_ONCE} agents fall silent (default: 5)")
    options.add_argument("--pin", action="store_true", help="a core for the supervisor alone, the others for the agents")
    options.add_argument("--serve", metavar="FOLDER", help="be the supervisor of a run there (used by the benchmark itself)")
    args = options.parse_args()
    if args.serve:
        sys.exit(serve(Path(args.serve), args.agents))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < args.agents + 200:
        options.error(
            f"{args.agents} agents need as many open files in each process, and the hard limit is {hard} (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    *others, last = sorted(os.sched_getaffinity(0))
    folder = Path(tempfile.mkdtemp(prefix="slurm-resilience-scale-"))
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder / "run"), "--agents", str(args.agents)], stdout=log, stderr=log
        )
    if args.pin:
        os.sched_setaffinity(process.pid, {last})
        os.sched_setaffinity(0, others or {last})
    try:
        figures, more = measure(folder / "run", process, args)
    except RuntimeError as error:
        said = (folder / "log").read_text(errors="replace")[-1500:]
        sys.exit(f"scale.py: {error}; the supervisor's last words: {said or 'none'}")
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    record.emit(args, "scale", figures, **more)


if __name__ == "__main__":
    main()
