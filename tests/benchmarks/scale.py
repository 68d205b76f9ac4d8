"""10,000 simulated agents against one real supervisor, on loopback: what it costs, and whether it still sees in time.

    python tests/benchmarks/scale.py [--agents 10000] [--json FILE]

The supervisor is the real one (sockets, coordinator, events), in a process of its own, which never uses more than one core.
The agents are connections of a second process: they greet, beat with the progress of one rank, launch,
die and stop as they are told; the supervisor tells them how often to beat.  Figures:

    detect_p50_s, detect_p99_s   from the last beat of an agent that falls silent until its ``agent_lost`` (limit: 4 s)
    stop_p50_s, stop_p99_s       from that decision until an agent has the order to stop, over all agents
    relaunch_s                   from the decision until the last agent has its ranks of the next attempt to launch
    cores                        CPU seconds a second of the supervisor while all is well
    rss_bytes                    its memory
    join_s                       from the first connection until the first attempt is launched everywhere
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from slurm_resilience.observe.events import read_events
from slurm_resilience.progress.page import Phase
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.address import SupervisorAddress
from tests.benchmarks import record

STEADY_S, JOIN_S, TRIAL_S = 20.0, 240.0, 90.0
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


class SimulatedAgent(asyncio.Protocol):
    """One agent as the supervisor meets it on the wire."""

    def __init__(self, crowd: Crowd, node: str, number: int) -> None:
        self.crowd, self.node, self.number = crowd, node, number
        self.transport: asyncio.Transport | None = None
        self.mute = False
        self.attempt, self.ranks, self.beats = 0, [], 0
        self.beat_at = self.killed_at = self.launched_at = 0.0
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        greeting = m.Hello.build(
            self.crowd.address.token, node=self.node, pid=os.getpid(), boot_id="b", job_id="local", restart=0,
            address="127.0.0.1", warm=True, cold_reason="", attempt=0, ranks=[],
        )  # fmt: skip
        self.say(greeting)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b'{"m":"welcome"'):
                welcome = m.parse(line)
                assert isinstance(welcome, m.Welcome)
                self.crowd.beat_every_s = welcome.beat_every_s
            if not line.startswith((b'{"m":"ping"', b'{"m":"welcome"')) and not self.mute:
                self.obey(m.parse(line))

    def obey(self, message: m.Message) -> None:
        match message:
            case m.Store(attempt):
                self.say(m.StoreReady(attempt, 1))
            case m.Launch(attempt=attempt, ranks=ranks):
                self.attempt, self.ranks, self.launched_at = attempt, [rank for rank, _ in ranks], time.time()
                self.say(m.Launched(attempt, {}, True, "", 0.01))
            case m.Kill(attempt):
                self.killed_at = time.time()
                for rank in self.ranks:
                    self.say(m.Exit(self.attempt, rank, -9, "SIGKILL", False, time.time(), [], 10))
                self.ranks = []
                self.say(m.Stopped(attempt, 1, 0.01, "kill"))

    def beat(self) -> None:
        self.beats += 1
        self.beat_at = time.time()
        progress = [100, int(Phase.STEP), 0.05, False, 30.0, 100 + self.beats, [], 0.1, 50, 0.0]
        self.say(m.Beat(self.beats, self.attempt if self.ranks else 0, {str(rank): progress for rank in self.ranks}))

    def say(self, message: m.Message) -> None:
        if self.transport is not None and not self.mute and not self.transport.is_closing():
            self.transport.write(message.to_line())


class Crowd:
    """All agents."""

    def __init__(self, address: SupervisorAddress, count: int) -> None:
        self.address, self.beat_every_s = address, m.BEAT_EVERY_S
        self.agents = [SimulatedAgent(self, f"n{number}", number) for number in range(count)]

    async def join(self) -> None:
        """All dial, some hundreds at a time."""
        loop = asyncio.get_running_loop()
        gate = asyncio.Semaphore(200)

        async def dial(agent: SimulatedAgent) -> None:
            async with gate:
                # Further source addresses of loopback, since one has not ports enough for all and for those in TIME_WAIT.
                source = (f"127.0.{1 + agent.number // 5000}.1", 0)
                await loop.create_connection(lambda: agent, self.address.host, self.address.port, local_addr=source)

        await asyncio.gather(*(dial(agent) for agent in self.agents))

    async def keep_beating(self) -> None:
        """Each agent as often as it was told, spread evenly."""
        turns = 50
        due, turn = time.monotonic(), 0
        while True:
            for agent in self.agents[turn % turns :: turns]:
                agent.beat()
            turn += 1
            due += self.beat_every_s / turns
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def alive(self) -> list[SimulatedAgent]:
        return [agent for agent in self.agents if not agent.mute]


class Bench:
    """The trials, seen from the agents' side and from the run's events."""

    def __init__(self, folder: Path, crowd: Crowd, pid: int) -> None:
        self.folder, self.crowd, self._pid = folder, crowd, pid
        self.detect: list[float] = []
        self.stop: list[float] = []
        self.relaunch: list[float] = []

    async def until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come within {within_s:g} s")
            await asyncio.sleep(0.1)

    def launched(self, attempt: int) -> bool:
        return all(agent.attempt >= attempt for agent in self.crowd.alive())

    def spent_s(self) -> float:
        """CPU seconds of the supervisor so far."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self._pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def trial(self, silent: list[SimulatedAgent], spread_s: float) -> None:
        """These agents fall silent one by one; the rest is stopped and launched anew."""
        attempt = max(agent.attempt for agent in self.crowd.alive())
        since: dict[str, float] = {}
        for agent in silent:
            agent.mute = True
            since[agent.node] = agent.beat_at
            await asyncio.sleep(spread_s / len(silent))
        lost: dict[str, float] = {}

        def seen() -> bool:
            for event in read_events(self.folder):
                if event["event"] == "agent_lost" and event["node"] in since:
                    lost[str(event["node"])] = float(event["t"])
            return len(lost) == len(since) and self.launched(attempt + 1)

        await self.until(seen, TRIAL_S, "The next attempt")
        decided = min(lost.values())
        self.detect += [lost[node] - at for node, at in since.items()]
        self.stop += [agent.killed_at - decided for agent in self.crowd.alive()]
        self.relaunch.append(max(agent.launched_at for agent in self.crowd.alive()) - decided)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


async def measure(folder: Path, process: subprocess.Popen[bytes], args: Any) -> tuple[dict[str, float | None], dict[str, Any]]:
    found: list[SupervisorAddress] = []
    bench: Bench

    def there() -> bool:
        address = SupervisorAddress.read(folder)
        found[:] = [address] if address is not None else []
        return bool(found)

    bench = Bench(folder, Crowd.__new__(Crowd), process.pid)
    await bench.until(there, 30.0, "The supervisor")
    bench.crowd = Crowd(found[0], args.agents)
    clock = record.Clock()
    beating = asyncio.ensure_future(bench.crowd.keep_beating())
    await bench.crowd.join()
    connected_s = clock.read()
    await bench.until(lambda: bench.launched(1), JOIN_S, "The first attempt")
    join_s = clock.read()
    print(f"connected after {connected_s:.1f} s, launched after {join_s:.1f} s", file=sys.stderr, flush=True)
    await asyncio.sleep(5.0)
    spent, clock = bench.spent_s(), record.Clock()
    await asyncio.sleep(STEADY_S)
    cores = (bench.spent_s() - spent) / clock.read()
    print(f"{cores:.3f} cores", file=sys.stderr, flush=True)
    choose = random.Random(1)
    for number in range(args.trials):
        await bench.trial(choose.sample(bench.crowd.alive(), SILENT_AT_ONCE), 1.0)
        so_far = f"detect p99 {percentile(bench.detect, 0.99):.2f} s, stop p99 {percentile(bench.stop, 0.99):.2f} s"
        print(f"trial {number}: {so_far}, relaunch {bench.relaunch[-1]:.2f} s", file=sys.stderr, flush=True)
        await asyncio.sleep(3.0)
    lost = [event for event in read_events(folder) if event["event"] == "agent_lost"]
    rss = bench.rss_bytes()
    beating.cancel()
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
    }
    return figures, {"silenced": len(bench.detect), "false_alarms": len(lost) - len(bench.detect)}


def main() -> None:
    options = record.parser(__doc__)
    options.add_argument("--agents", type=int, default=10_000, help="(default: 10000)")
    options.add_argument("--trials", type=int, default=5, help=f"times that {SILENT_AT_ONCE} agents fall silent (default: 5)")
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
    folder = Path(tempfile.mkdtemp(prefix="slurm-resilience-scale-"))
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder / "run"), "--agents", str(args.agents)], stdout=log, stderr=log
        )
    try:
        figures, more = asyncio.run(measure(folder / "run", process, args))
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
