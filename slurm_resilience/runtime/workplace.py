"""What of the run is on this node, and what is still to be started or stopped there: ranks, launchers, stores.

The agent's hands.  Everything is done in ticks, nothing is waited for; a launch waits until what was there before is
provably gone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_resilience.runtime.accelerator_memory import MemoryWait
from slurm_resilience.runtime.command import launcher_command, parse_python
from slurm_resilience.runtime.launcher_link import LauncherLink
from slurm_resilience.runtime.launchers import Launchers
from slurm_resilience.runtime.local_ranks import LocalRanks
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.messages import Kill, Launch, LaunchFailed, Message, Order, Stopped, Store
from slurm_resilience.runtime.node_folder import NodeFolder
from slurm_resilience.runtime.prefetch import prefetch
from slurm_resilience.runtime.preload import read_learned
from slurm_resilience.runtime.processes import descendants, reap, send_signal
from slurm_resilience.runtime.rank_keeper import RankKeeper
from slurm_resilience.runtime.stopping import Stop
from slurm_resilience.runtime.stores import Stores
from slurm_resilience.runtime.witness import Witness

_LAST_WORDS_S = 1.0
_STUCK_FORK_S = 2.0
_LOOK_EVERY_S = 0.02
_PREFETCH_S = 30.0


class Workplace:
    """``tell(message)`` goes to the supervisor; ``job()`` is the allocation that we work for; ``warmth()`` is called when
    :attr:`launchers` may have become able, or unable, to fork.

    ``fence`` is the newest attempt that was heard of here; older ones are refused.  ``keeper`` has the ranks.
    ``heirs`` are no part of the run's work, and left alone with all that is below them.
    """

    def __init__(
        self, loop: Loop, run_dir: Path, node: str, run: Mapping[str, Any], folder: NodeFolder, *,
        identity: Mapping[str, str], job: Callable[[], tuple[str, int]], tell: Callable[[Message], None],
        warmth: Callable[[], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._loop, self._run_dir, self._node, self._folder = loop, run_dir, node, folder
        self._run_id: str = run["run_id"]
        self._job, self._tell, self._say = job, tell, say
        wrap = list(run.get("wrap") or [])
        log = run_dir / "logs" / f"launcher-{node}.log"
        command = parse_python(run["argv"])
        self.launchers = self._make_launchers(run, wrap, identity, log, warmth)
        self._stores = Stores(loop, command, wrap=wrap, log=log, tell=tell)
        self.keeper = RankKeeper(
            loop, folder, run_dir, command=command, wrap=wrap,
            tell=tell, failed=lambda _: self._begin_stop(self.fence, "launch_failed"),
        )  # fmt: skip
        self._witness = Witness(loop, run_dir, tell)
        self._memory = MemoryWait(loop, say, self._advance)
        self._pending: Launch | None = None
        self._stop: Stop | None = None
        self.fence = 0
        self.heirs: set[int] = set()
        self._since = 0.0

    # --- what is here -------------------------------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        """The attempt whose ranks are here, 0 for none."""
        return self.keeper.attempt

    @property
    def busy(self) -> bool:
        """Ranks are here, or about to be."""
        return self.keeper.ranks is not None or self._pending is not None

    @property
    def stopping(self) -> str:
        """Why everything is being stopped; "" when it is not."""
        return self._stop.why if self._stop is not None else ""

    def next_look(self) -> float:
        """When :meth:`tick` is wanted again, for a stop or what comes after it (monotonic)."""
        if self._witness.looking:
            return time.monotonic() + _LOOK_EVERY_S
        return self._stop.next_look() if self._stop is not None else self._memory.next_look()

    # --- what is asked ------------------------------------------------------------------------------------------------

    def obey(self, message: Message) -> str:
        """Do what the supervisor says, or begin to; why not, "" when it is done."""
        match message:
            case Launch():
                return self._launch(message)
            case Store(attempt):
                if attempt < self.fence or (self._stop is not None and attempt <= self._stop.attempt):
                    return f"attempt {self.fence} was here already"
                self._stores.want(attempt)
            case Kill(attempt, grace_s):
                if self.keeper.attempt > attempt:
                    return f"attempt {self.keeper.attempt} runs here"
                self.fence = max(self.fence, attempt)
                if message.look and self._stop is None and self.keeper.ranks is not None and not self._witness.looking:
                    self._prefetch(self.keeper.ranks)
                    self._witness.begin(message, self.keeper.ranks)
                else:
                    self._begin_stop(attempt, "kill", grace_s)
            case Order():
                ranks = self.keeper.ranks
                if ranks is None or ranks.attempt != message.attempt:
                    return "that attempt does not run here"
                ranks.order(stop=message.stop, save=message.save, deadline=message.deadline, cause=message.cause)
            case _:
                return "an agent does not obey this"
        return ""

    def stop_all(self, why: str, *, since: float = 0.0) -> None:
        """Stop whatever is here, of any attempt.  ``since``: wall clock of what it is stopped for."""
        self._since = since
        self._begin_stop(self.fence, why)

    def hold_ranks(self) -> None:
        """Stop all processes of the ranks, so that nothing runs that may not; they can be killed as well as before."""
        self._signal_ranks(signal.SIGSTOP)

    def let_go(self) -> None:
        """Let them go on."""
        self._signal_ranks(signal.SIGCONT)

    def _signal_ranks(self, number: int) -> None:
        spare = self.launchers.processes() | set(self._loop.helpers())
        for process in descendants(os.getpid(), spare=spare, spare_trees=self.heirs):
            send_signal(process, number)

    def tick(self, now: float) -> None:
        """Go on with everything that can go on."""
        self._bury()
        self.launchers.tick(now)
        self._memory.tick(now)
        looked = self._witness.tick(now)
        if looked is not None:
            self._begin_stop(looked.attempt, "kill", looked.grace_s)
        self._advance()

    def learn(self, now: float) -> None:
        """Have the next launcher know what these ranks had to import by themselves."""
        self.keeper.learn(now, self.launchers)

    # --- starting -----------------------------------------------------------------------------------------------------

    def _launch(self, launch: Launch) -> str:
        if launch.attempt <= self.fence:
            return f"attempt {self.fence} was here already"
        self.fence = launch.attempt
        self._pending = launch
        return ""

    def _advance(self) -> None:
        """Whatever can go on goes on: a stop, a store, a launch, in this order."""
        stopped = self._stop is None or self._proven(self._stop)
        self._stores.advance(self.launchers)
        launch = self._pending
        if launch is None or not stopped or not self._memory.over:
            return
        if self.keeper.ranks is not None:
            self._begin_stop(launch.attempt - 1, "launch")
            return
        if self.launchers.warm is None and launch.wait_warm:
            return
        self._pending = None
        self._start(launch)

    def _start(self, launch: Launch) -> None:
        job_id, restart = self._job()
        try:
            ranks = LocalRanks.prepare(
                launch, self._folder, base=os.environ, run_dir=self._run_dir, run_id=self._run_id,
                node=self._node, job_id=job_id, restart=restart,
            )  # fmt: skip
        except (OSError, ValueError, TypeError) as error:
            self._tell(LaunchFailed(launch.attempt, f"cannot prepare the ranks: {error}"))
            return
        self.keeper.start(ranks, self.launchers)

    def _prefetch(self, ranks: LocalRanks) -> None:
        """After a fault these ranks' successors load what these have saved: it can be read while they are stopped."""
        root, mine = Path(ranks.launch.checkpoints), set(ranks.ranks)

        def said(found: Any) -> None:
            if found:
                size = f"{found['bytes'] / 1e6:.1f} MB in {found['files']} files"
                self._say(f"{size} of {found['checkpoint']} are being read ahead")

        self._loop.aside(lambda: prefetch(root, mine), said, within_s=_PREFETCH_S)

    # --- launchers ----------------------------------------------------------------------------------------------------

    def _make_launchers(
        self, run: Mapping[str, Any], wrap: list[str], identity: Mapping[str, str], log: Path, warmth: Callable[[], None]
    ) -> Launchers:
        config = run["config"]
        command, reason = launcher_command(run["argv"], wrap=wrap, warm=config["warm"], environment=os.environ)
        environment = {
            **os.environ, **identity, "RESILIENCE_RUN_DIR": str(self._run_dir),
            # No thread may exist before the fork, and an unanswered reverse lookup must not cost more than a second.
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1",
        }  # fmt: skip
        return Launchers(
            self._loop, command, named=config["preload"], learned=read_learned(self._run_dir) if command else [],
            environment=environment, log=log, agent=os.getpid(), reason=reason,
            heard=self._launcher_spoke, lost=self._launcher_lost, changed=warmth, say=self._say,
        )  # fmt: skip

    def _launcher_spoke(self, link: LauncherLink, message: dict[str, Any]) -> None:
        kind, attempt, rank = message["m"], message["attempt"], message.get("rank", -1)
        if kind == "ended":
            link.children.discard(message["pid"])
            self._ended(message["pid"], message["status"])
            return
        link.pending -= 1
        if kind == "cold":
            if rank < 0:
                self._stores.start_cold(attempt)
            elif self._stop is None:
                self.keeper.not_forked(attempt, rank, message["why"])
            return
        link.children.add(message["pid"])
        if kind == "store_ready":
            self._stores.forked(attempt, message["pid"], message["port"])
        else:
            self.keeper.forked(attempt, rank, message["pid"])

    def _launcher_lost(self, link: LauncherLink) -> None:
        """Its ranks died with it; what they left behind is killed with the attempt."""
        for process in descendants(os.getpid()):
            if process.pid in link.pids:
                send_signal(process, signal.SIGKILL)
        link.pending = 0
        self._bury()
        self.keeper.lost(link)

    # --- ending -------------------------------------------------------------------------------------------------------

    def _bury(self) -> None:
        """Take note of children that ended: cold ranks, launchers, helpers, and orphans that came to us."""
        for pid, status in reap():
            self.heirs.discard(pid)
            self._ended(pid, status)

    def _ended(self, pid: int, status: int) -> None:
        self.keeper.ended(pid, status, killed=self._stop is not None and pid in self._stop.killed)
        self._stores.ended(pid, expected=self._stop is not None)

    def _begin_stop(self, attempt: int, why: str, grace_s: float = 0.0) -> None:
        if self._pending is not None and self._pending.attempt <= attempt:
            self._pending = None
        self._stores.forget(attempt)
        self._witness.forget()
        if self._stop is not None:
            self._stop.hurry(attempt, why, grace_s)
            return
        leaders = [rank.process for rank in self.keeper.alive() if rank.process is not None]
        if grace_s > 0 and self.keeper.ranks is not None:
            self.keeper.ranks.order(stop=True, save=0, deadline=time.time() + grace_s, cause=why)
        self._stop = Stop(attempt, why, grace_s=grace_s, leaders=leaders)
        self._advance()

    def _proven(self, stop: Stop) -> bool:
        """Go on with the stop; True when nothing of the attempt is alive any more, which is then told."""
        spare = self.launchers.processes() | set(self._loop.helpers())
        spare |= self._stores.processes(after=stop.attempt)
        if not stop.tick(spare, self.heirs):
            if complaint := stop.complaint():
                self._say(complaint)
            return False
        if self.launchers.pending():  # what it forks now would come after the proof
            if stop.seconds > _STUCK_FORK_S:
                self.launchers.drop_stuck()
            return False
        self._bury()
        if stop.seconds < _LAST_WORDS_S and not self.keeper.silent():
            return False  # how they ended is on its way from the launcher, and what they said last from their logs
        self._memory.begin(stop.killed | self.keeper.pids())
        self.keeper.discard()
        self._stop = None
        self._say(
            f"attempt {stop.attempt} is stopped ({stop.why}): {len(stop.killed)} processes killed in {stop.seconds:.3f} s"
        )
        self._tell(Stopped(stop.attempt, len(stop.killed), round(stop.seconds, 4), stop.why, self._since))
        self._since = 0.0
        return True
