"""One agent per node: ``python -m slurm_resilience.runtime.agent --run-dir RUN_DIR --node NAME``.

It owns every process of the run on its node, does what the supervisor says, and stops them by itself when it no longer
hears from the supervisor.  Its loop never waits for anything but a socket.  It never imports torch; its launcher does.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import read_json
from slurm_resilience._clock import boot_id
from slurm_resilience.errors import ConfigError, ExitCode, ResilienceError
from slurm_resilience.progress.facts import FactReceiver
from slurm_resilience.runtime.command import launcher_command, parse_python
from slurm_resilience.runtime.deadman import DeadMan
from slurm_resilience.runtime.guardian import guard, kill_all
from slurm_resilience.runtime.launcher_link import LauncherLink
from slurm_resilience.runtime.launchers import Launchers
from slurm_resilience.runtime.lease import FROZEN_S, Lease
from slurm_resilience.runtime.leftovers import clear_leftovers
from slurm_resilience.runtime.local_ranks import LocalRanks
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.messages import (
    BEAT_EVERY_S,
    Fact,
    Hello,
    Kill,
    Launch,
    LaunchFailed,
    Message,
    Order,
    Quit,
    Refused,
    Stopped,
    Store,
    Warm,
    Warned,
)
from slurm_resilience.runtime.node_folder import NodeFolder, place
from slurm_resilience.runtime.preload import read_learned
from slurm_resilience.runtime.processes import become_subreaper, descendants, reap, send_signal
from slurm_resilience.runtime.rank_keeper import RankKeeper
from slurm_resilience.runtime.signal_feed import SignalFeed
from slurm_resilience.runtime.stopping import Stop
from slurm_resilience.runtime.stores import Stores
from slurm_resilience.runtime.uplink import Uplink

_LAST_WORDS_S = 1.0
_STUCK_FORK_S = 2.0


class Agent:
    """The node's side of a run.  :meth:`run` returns the exit code."""

    def __init__(self, run_dir: Path, node: str, run: Mapping[str, Any], guardian: int, deadman: DeadMan) -> None:
        self._run_dir, self._node, self._guardian, self._deadman = run_dir, node, guardian, deadman
        self._run_id: str = run["run_id"]
        limits = run["config"]["limits"]
        self._orphan_s: float = limits["orphan_s"]
        self._lease = Lease(limits["agent_silence_s"], limits["node_silence_s"], time.monotonic())
        self._wrap: list[str] = list(run.get("wrap") or [])
        self._identity = {"RESILIENCE_RUN_ID": self._run_id, "RESILIENCE_NODE": node}
        become_subreaper()
        self._signals = SignalFeed()
        self._folder = NodeFolder(self._run_id, node)
        clear_leftovers(self._identity, say=self._say)
        self._loop = Loop()
        self._loop.watch(self._signals, self._signals_came)
        self._facts = FactReceiver(self._folder.facts)
        self._loop.watch(self._facts, self._facts_came)
        self._uplink = Uplink(
            self._loop, run_dir, self._lease, greet=self._greet, welcomed=self._welcomed, obey=self._obey, say=self._say
        )
        self._launchers = self._make_launchers(run)
        self._stores = Stores(self._loop, self._command, wrap=self._wrap, log=self._launcher_log, tell=self._uplink.tell)
        self._keeper = RankKeeper(
            self._loop, self._folder, run_dir, command=self._command, wrap=self._wrap,
            tell=self._uplink.tell, failed=lambda _: self._begin_stop(self._fence, "launch_failed"),
        )  # fmt: skip
        self._pending: Launch | None = None
        self._stop: Stop | None = None
        self._fence = 0
        self._beat_at = 0.0
        self._code: int | None = None
        self._warmth: tuple[bool | None, str] = (None, "")

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until told to quit, or until there is nobody to serve."""
        self._say(f"agent {os.getpid()} of run {self._run_id} on {self._node}")
        before = time.monotonic()
        while self._code is None:
            self._loop.turn(self._patience())
            now = time.monotonic()
            if now - before > FROZEN_S:
                self._was_frozen(now, now - before)
            before = now
            self._bury()
            self._uplink.tick(now)
            self._launchers.tick(now)
            self._advance(now)
            if now >= self._beat_at:
                self._beat(now)
            self._check_lease(now)
            self._hold_ranks()
            if os.getppid() != self._guardian:
                self._end("the guardian is gone", ExitCode.INTERNAL)
            if self._uplink.fenced:
                self._end(self._uplink.fenced, ExitCode.OK)
        return self._code

    def _patience(self) -> float:
        until = self._beat_at
        if self._stop is not None:
            until = min(until, self._stop.next_look())
        return min(0.25, until - time.monotonic())

    def _beat(self, now: float) -> None:
        self._beat_at = now + BEAT_EVERY_S
        ranks = self._keeper.ranks
        self._uplink.beat(self._keeper.attempt, ranks.progress() if ranks is not None else {})
        self._keeper.learn(now, self._launchers)

    def _was_frozen(self, now: float, seconds: float) -> None:
        """A stopped process wakes up with an old view.  The sockets have been read by now; say that we live, and look on."""
        self._say(f"this agent did not run for {seconds:.1f} s")
        self._lease.wake(now)
        self._beat(now)

    def _check_lease(self, now: float) -> None:
        age = self._lease.age(now)
        if self._lease.has_ended(now):
            busy = self._keeper.ranks is not None or self._pending is not None
            if busy and (self._stop is None or self._stop.why != "silence"):
                self._say(f"the supervisor has not heard us for {age:.1f} s: stopping what runs here")
                self._begin_stop(self._fence, "silence")
            if self._uplink.up:
                self._uplink.drop("silence")
        if age > self._orphan_s and self._stop is None:
            self._end(f"no supervisor for {age:.0f} s", ExitCode.NODE_LOST)

    def _hold_ranks(self) -> None:
        """Should this process be stopped, the guardian knows until when what runs here may do so."""
        if self._keeper.ranks is None and self._pending is None:
            self._deadman.release()
        else:
            self._deadman.hold(self._lease.hard_end(), self._launchers.processes())

    def _end(self, why: str, code: int) -> None:
        self._say(f"ending: {why}")
        self._launchers.close()
        killed, left = kill_all(5.0)
        if left:
            self._say(f"{left} processes would not die")
        self._folder.remove()
        self._say(f"ended; {killed} processes were still to be killed")
        self._code = int(code)

    # --- the supervisor -----------------------------------------------------------------------------------------------

    def _greet(self, token: str, address: str) -> Hello:
        job_id, restart = self._uplink.job
        return Hello.build(
            token, node=self._node, pid=os.getpid(), boot_id=boot_id(), job_id=job_id, restart=restart, address=address,
            warm=self._launchers.warm is True, cold_reason="" if self._launchers.warm else self._launchers.reason,
            attempt=self._keeper.attempt, ranks=[rank.rank for rank in self._keeper.alive()],
        )  # fmt: skip

    def _welcomed(self) -> None:
        """What an earlier supervisor may have missed comes again."""
        if self._launchers.warm is not None:
            self._tell_warmth()
        for end in self._keeper.ends():
            self._uplink.repeat(end)
        self._beat(time.monotonic())

    def _obey(self, message: Message) -> None:
        if isinstance(message, Launch):
            if message.attempt <= self._fence:
                self._refuse(message.kind, message.attempt, f"attempt {self._fence} was here already")
                return
            self._fence = message.attempt
            self._pending = message
        elif isinstance(message, Store):
            if message.attempt < self._fence or (self._stop is not None and message.attempt <= self._stop.attempt):
                self._refuse(message.kind, message.attempt, f"attempt {self._fence} was here already")
                return
            self._stores.want(message.attempt)
        elif isinstance(message, Kill):
            if self._keeper.attempt > message.attempt:
                self._refuse(message.kind, message.attempt, f"attempt {self._keeper.attempt} runs here")
                return
            self._fence = max(self._fence, message.attempt)
            self._begin_stop(message.attempt, "kill", message.grace_s)
        elif isinstance(message, Order):
            ranks = self._keeper.ranks
            if ranks is None or ranks.attempt != message.attempt:
                self._refuse(message.kind, message.attempt, "that attempt does not run here")
                return
            ranks.order(stop=message.stop, save=message.save, deadline=message.deadline, cause=message.cause)
        elif isinstance(message, Quit):
            self._end(f"the supervisor said so {message.why}".rstrip(), ExitCode.OK)
        else:
            self._refuse(message.kind, 0, "an agent does not obey this")

    def _refuse(self, what: str, attempt: int, why: str) -> None:
        self._say(f"refused {what} of attempt {attempt}: {why}")
        self._uplink.tell(Refused(what, attempt, why))

    def _tell_warmth(self) -> None:
        warm = self._launchers.warm
        self._uplink.tell(Warm(warm is True, "" if warm else self._launchers.reason, self._launchers.seconds, warm is not None))

    def _warmth_changed(self) -> None:
        now = (self._launchers.warm, self._launchers.reason)
        if now != self._warmth:
            self._warmth = now
            self._tell_warmth()

    # --- starting -----------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Whatever can go on goes on: a stop, a store, a launch, in this order."""
        stopped = self._stop is None or self._proven(self._stop)
        self._stores.advance(self._launchers)
        launch = self._pending
        if launch is None or not stopped:
            return
        if self._keeper.ranks is not None:
            self._begin_stop(launch.attempt - 1, "launch")
            return
        if self._launchers.warm is None and launch.wait_warm:
            return
        self._pending = None
        self._start(launch)

    def _start(self, launch: Launch) -> None:
        job_id, restart = self._uplink.job
        try:
            ranks = LocalRanks.prepare(
                launch, self._folder, base=os.environ, run_dir=self._run_dir, run_id=self._run_id,
                node=self._node, job_id=job_id, restart=restart,
            )  # fmt: skip
        except (OSError, ValueError, TypeError) as error:
            self._uplink.tell(LaunchFailed(launch.attempt, f"cannot prepare the ranks: {error}"))
            return
        self._keeper.start(ranks, self._launchers)

    # --- launchers ----------------------------------------------------------------------------------------------------

    def _make_launchers(self, run: Mapping[str, Any]) -> Launchers:
        config = run["config"]
        self._launcher_log = self._run_dir / "logs" / f"launcher-{self._node}.log"
        self._command = parse_python(run["argv"])
        command, reason = launcher_command(run["argv"], wrap=self._wrap, warm=config["warm"], environment=os.environ)
        environment = {
            **os.environ, **self._identity, "RESILIENCE_RUN_DIR": str(self._run_dir),
            # No thread may exist before the fork, and an unanswered reverse lookup must not cost more than a second.
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1",
        }  # fmt: skip
        return Launchers(
            self._loop, command, named=config["preload"], learned=read_learned(self._run_dir) if command else [],
            environment=environment, log=self._launcher_log, agent=os.getpid(), reason=reason,
            heard=self._launcher_spoke, lost=self._launcher_lost, changed=self._warmth_changed, say=self._say,
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
                self._keeper.not_forked(attempt, rank, message["why"])
            return
        link.children.add(message["pid"])
        if kind == "store_ready":
            self._stores.forked(attempt, message["pid"], message["port"])
        else:
            self._keeper.forked(attempt, rank, message["pid"])

    def _launcher_lost(self, link: LauncherLink) -> None:
        """Its ranks died with it; what they left behind is killed with the attempt."""
        for process in descendants(os.getpid()):
            if process.pid in link.pids:
                send_signal(process, signal.SIGKILL)
        link.pending = 0
        self._bury()
        self._keeper.lost(link)

    # --- ending -------------------------------------------------------------------------------------------------------

    def _bury(self) -> None:
        """Take note of children that ended: cold ranks, launchers, helpers, and orphans that came to us."""
        for pid, status in reap():
            self._ended(pid, status)

    def _ended(self, pid: int, status: int) -> None:
        self._keeper.ended(pid, status, killed=self._stop is not None and pid in self._stop.killed)
        self._stores.ended(pid, expected=self._stop is not None)

    def _begin_stop(self, attempt: int, why: str, grace_s: float = 0.0) -> None:
        if self._pending is not None and self._pending.attempt <= attempt:
            self._pending = None
        self._stores.forget(attempt)
        if self._stop is not None:
            self._stop.hurry(attempt, why, grace_s)
            return
        leaders = [rank.process for rank in self._keeper.alive() if rank.process is not None]
        if grace_s > 0 and self._keeper.ranks is not None:
            self._keeper.ranks.order(stop=True, save=0, deadline=time.time() + grace_s, cause=why)
        self._stop = Stop(attempt, why, grace_s=grace_s, leaders=leaders)
        self._advance(time.monotonic())

    def _proven(self, stop: Stop) -> bool:
        """Go on with the stop; True when nothing of the attempt is alive any more, which is then told."""
        spare = self._launchers.processes() | set(self._loop.helpers())
        spare |= self._stores.processes(after=stop.attempt)
        if not stop.tick(spare):
            if complaint := stop.complaint():
                self._say(complaint)
            return False
        if self._launchers.pending():  # what it forks now would come after the proof
            if stop.seconds > _STUCK_FORK_S:
                self._launchers.drop_stuck()
            return False
        self._bury()
        if stop.seconds < _LAST_WORDS_S and not self._keeper.silent():
            return False  # how they ended is on its way from the launcher, and what they said last from their logs
        self._keeper.discard()
        self._stop = None
        self._say(
            f"attempt {stop.attempt} is stopped ({stop.why}): {len(stop.killed)} processes killed in {stop.seconds:.3f} s"
        )
        self._uplink.tell(Stopped(stop.attempt, len(stop.killed), round(stop.seconds, 4), stop.why))
        return True

    # --- signals, facts, log ------------------------------------------------------------------------------------------

    def _signals_came(self) -> None:
        for name in self._signals.warnings():
            self._say(f"got {name}")
            self._uplink.tell(Warned(name, time.time()))

    def _facts_came(self) -> None:
        now = time.time()
        for fact in self._facts.receive():
            kind, attempt, rank, fields = fact["kind"], fact.get("attempt"), fact.get("rank"), fact.get("fields")
            if not isinstance(attempt, int) or not isinstance(rank, int) or not isinstance(fields, dict):
                self._say(f"a datagram that is no fact: {str(fact)[:200]}")
            elif attempt != self._keeper.attempt:
                self._say(f"a fact of attempt {attempt} came too late: {kind}")
            else:
                self._uplink.tell(Fact(attempt, rank, kind, fields, now))

    def _say(self, text: str) -> None:
        """Into the agent's log; lost rather than waited for when the guardian cannot write."""
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        try:
            os.write(2, f"{stamp}.{int(now * 1000) % 1000:03d}Z {text}\n".encode())
        except OSError:
            return


def _read_run(run_dir: Path) -> dict[str, Any]:
    try:
        run = read_json(run_dir / "run.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {run_dir}/run.json", evidence=str(error)) from error
    if not isinstance(run, dict):
        raise ConfigError(
            f"{run_dir} is not a run folder",
            evidence="it holds no run.json",
            remedy="is it on a file system that this node sees?",
        )
    return run


def main(argv: list[str] | None = None) -> int:
    """Start the guardian and be the agent."""
    parser = argparse.ArgumentParser(prog="python -m slurm_resilience.runtime.agent", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--node", required=True)
    args = parser.parse_args(argv)
    run_dir: Path = args.run_dir.absolute()
    try:
        run = _read_run(run_dir)
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        guardian, deadman = guard(logs / f"agent-{args.node}.log", place(run["run_id"], args.node))
        return Agent(run_dir, args.node, run, guardian, deadman).run()
    except ResilienceError as error:
        print(f"agent on {args.node}: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
