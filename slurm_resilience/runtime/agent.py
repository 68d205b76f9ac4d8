"""One agent per node: ``python -m slurm_resilience.runtime.agent --run-dir RUN_DIR --node NAME``.

It owns every process of the run on its node, does what the supervisor says, and stops them by itself when it no longer
hears from the supervisor.  Its loop never waits for anything but a socket.  It never imports torch; its launcher does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import read_json
from slurm_resilience._clock import boot_id
from slurm_resilience.errors import ConfigError, ExitCode, ResilienceError
from slurm_resilience.progress.facts import FactReceiver
from slurm_resilience.runtime.blind import Blind
from slurm_resilience.runtime.deadman import DeadMan
from slurm_resilience.runtime.election import Election
from slurm_resilience.runtime.guardian import guard, kill_all
from slurm_resilience.runtime.hint_writer import leave_hint
from slurm_resilience.runtime.lease import FROZEN_S, Lease
from slurm_resilience.runtime.leftovers import clear_leftovers
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.messages import (
    Fact,
    Hello,
    Hint,
    Message,
    Quit,
    Refused,
    Seen,
    Warm,
    Warned,
)
from slurm_resilience.runtime.node_folder import NodeFolder, place
from slurm_resilience.runtime.processes import become_subreaper, spawn
from slurm_resilience.runtime.signal_feed import SignalFeed
from slurm_resilience.runtime.uplink import Uplink
from slurm_resilience.runtime.workplace import Workplace

_LAST_WORDS_S = 1.0
_STUCK_FORK_S = 2.0
_SEEN_EVERY_S = 3.0


class Agent:
    """The node's side of a run.  :meth:`run` returns the exit code."""

    def __init__(self, run_dir: Path, node: str, run: Mapping[str, Any], guardian: int, deadman: DeadMan) -> None:
        self._run_dir, self._node, self._guardian, self._deadman = run_dir, node, guardian, deadman
        self._run_id: str = run["run_id"]
        limits = run["config"]["limits"]
        self._orphan_s: float = limits["orphan_s"]
        self._lease = Lease(limits["agent_silence_s"], limits["node_silence_s"], time.monotonic())
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
        self._work = Workplace(
            self._loop, run_dir, node, run, self._folder, identity=self._identity, job=lambda: self._uplink.job,
            tell=self._uplink.tell, warmth=self._warmth_changed, say=self._say,
        )  # fmt: skip
        self._election = Election(
            self._loop, run_dir, node, patience_s=limits.get("takeover_s", 0.0) if "SLURM_JOB_ID" in os.environ else 0.0,
            elected=self._elected, news=self._uplink.look_again, say=self._say,
        )  # fmt: skip
        self._awake_since = time.monotonic()
        self._beat_at = self._seen_at = 0.0
        self._blind = Blind(time.monotonic())
        self._held: tuple[float, float, int] | None = (
            None  # since when ranks wait for an answer, until when, on which connection
        )
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
            self._blind.turn(now)
            self._uplink.tick(now)
            self._work.tick(now)
            if now >= self._beat_at:
                self._beat(now)
            self._let_go(now)
            self._check_lease(now)
            self._election.tick(now, alone_s=now - max(self._lease.since, self._awake_since), refused=self._uplink.refused)
            self._hold_ranks()
            if os.getppid() != self._guardian:
                self._end("the guardian is gone", ExitCode.INTERNAL)
            if self._uplink.fenced:
                self._end(self._uplink.fenced, ExitCode.OK)
        return self._code

    def _patience(self) -> float:
        return min(0.25, min(self._beat_at, self._work.next_look()) - time.monotonic())

    def _beat(self, now: float) -> None:
        self._beat_at = now + self._uplink.beat_every_s
        ranks = self._work.keeper.ranks
        self._uplink.beat(self._work.attempt, ranks.progress(self._blind) if ranks is not None else {})
        if ranks is not None and now >= self._seen_at and (seen := ranks.seen()):
            self._seen_at = now + _SEEN_EVERY_S
            self._uplink.tell(Seen(ranks.attempt, seen))
        self._work.learn(now)

    def _was_frozen(self, now: float, seconds: float) -> None:
        """A stopped process wakes up with an old view.  The sockets have been read by now; say that we live, and look on."""
        self._say(f"this agent did not run for {seconds:.1f} s")
        if self._work.busy and not self._work.stopping and now > self._lease.hard_end():
            self._held = (now, self._lease.hold(now), self._uplink.welcomes)
            self._work.hold_ranks()
            self._say("its ranks are stopped until the supervisor says that they are still wanted")
        else:
            self._lease.wake(now)
        self._awake_since = now
        self._election.begin_again()
        self._beat(now)

    def _check_lease(self, now: float) -> None:
        age = self._lease.age(now)
        if self._lease.has_ended(now):
            if self._work.busy and self._work.stopping != "silence":
                self._say(f"the supervisor has not heard us for {age:.1f} s: stopping what runs here")
                self._work.stop_all("silence", since=round(time.time() - age, 3))
            if self._uplink.up:
                self._uplink.drop("silence")
        if age > self._orphan_s and not self._work.stopping and not self._work.heirs:
            self._end(f"no supervisor for {age:.0f} s", ExitCode.NODE_LOST)

    def _let_go(self, now: float) -> None:
        """Ranks that were held go on when the supervisor has answered: it was away as well, and has not given them up."""
        if self._held is None:
            return
        if self._work.stopping or not self._work.busy:
            self._held = None
        elif self._held[2] != self._uplink.welcomes or not self._uplink.up:
            # Whoever gives a node up ends its connection, and may have launched elsewhere.
            self._say("the supervisor has ended our connection meanwhile: stopping what runs here")
            self._work.stop_all("silence", since=round(time.time() - self._lease.age(now), 3))
        elif self._lease.since >= self._held[0]:
            self._say(f"the supervisor still wants them: they go on after {now - self._held[0]:.2f} s")
            self._held = None
            self._work.let_go()

    def _hold_ranks(self) -> None:
        """Should this process be stopped, the guardian knows until when what runs here may do so."""
        if self._work.busy:
            until = max(self._lease.hard_end(), self._held[1] if self._held is not None else 0.0)
            self._deadman.hold(until, self._work.launchers.processes())
        else:
            self._deadman.release()
        self._deadman.bequeath(next(iter(self._work.heirs), 0))

    def _end(self, why: str, code: int) -> None:
        self._say(f"ending: {why}")
        self._work.launchers.close()
        killed, left = kill_all(5.0, spare_trees=self._work.heirs)
        if left:
            self._say(f"{left} processes would not die")
        self._folder.remove()
        self._say(f"ended; {killed} processes were still to be killed")
        self._code = int(code)

    # --- the supervisor -----------------------------------------------------------------------------------------------

    def _greet(self, token: str, address: str) -> Hello:
        (job_id, restart), launchers = self._uplink.job, self._work.launchers
        return Hello.build(
            token, node=self._node, pid=os.getpid(), boot_id=boot_id(), job_id=job_id, restart=restart, address=address,
            warm=launchers.warm is True, cold_reason="" if launchers.warm else launchers.reason,
            attempt=self._work.attempt, ranks=[rank.rank for rank in self._work.keeper.alive()],
        )  # fmt: skip

    def _welcomed(self) -> None:
        """What an earlier supervisor may have missed comes again."""
        if self._work.launchers.warm is not None:
            self._tell_warmth()
        for end in self._work.keeper.ends():
            self._uplink.repeat(end)
        self._beat(time.monotonic())

    def _obey(self, message: Message) -> None:
        if isinstance(message, Quit):
            self._end(f"the supervisor said so {message.why}".rstrip(), ExitCode.OK)
            return
        if isinstance(message, Hint):
            told = leave_hint(self._node, cause=message.cause, attempt=message.attempt, at=message.at, environ=os.environ)
            self._say(f"a hint for root's checks: {message.cause}" + (f", not left: {told}" if told else ""))
            return
        refusal = self._work.obey(message)
        if refusal:
            attempt = getattr(message, "attempt", 0)
            self._say(f"refused {message.kind} of attempt {attempt}: {refusal}")
            self._uplink.tell(Refused(message.kind, attempt, refusal))

    def _elected(self, epoch: int, silent_s: float) -> None:
        """Start the supervisor that takes the place of the one that is lost; it outlives this agent."""
        words = [sys.executable, "-m", "slurm_resilience.runtime.takeover", "--run-dir", str(self._run_dir)]
        words += ["--node", self._node, "--epoch", str(epoch), "--silent-s", f"{silent_s:.2f}"]
        log = self._run_dir / "logs" / f"takeover-{self._node}.log"
        self._work.heirs.add(spawn(words, env=os.environ, log=log, outlive=True))

    def _tell_warmth(self) -> None:
        launchers = self._work.launchers
        warm = launchers.warm
        self._uplink.tell(Warm(warm is True, "" if warm else launchers.reason, launchers.seconds, warm is not None))

    def _warmth_changed(self) -> None:
        now = (self._work.launchers.warm, self._work.launchers.reason)
        if now != self._warmth:
            self._warmth = now
            self._tell_warmth()

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
            elif attempt != self._work.attempt:
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
