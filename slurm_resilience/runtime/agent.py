"""One agent per node: ``python -m slurm_resilience.runtime.agent --run-dir RUN_DIR --node NAME``.

It owns every process of the run on its node, does what the supervisor says, and stops them by itself when it no longer
hears from the supervisor.  Its loop never waits for anything but a socket.  It never imports torch; its launcher does.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import read_json
from slurm_resilience._clock import boot_id
from slurm_resilience.errors import ConfigError, ExitCode, ResilienceError
from slurm_resilience.progress.facts import FactReceiver
from slurm_resilience.runtime.cold import StoreHost, start_cold
from slurm_resilience.runtime.command import find_program, parse_python, same_interpreter
from slurm_resilience.runtime.guardian import guard, kill_all
from slurm_resilience.runtime.launcher_link import LauncherLink
from slurm_resilience.runtime.launchers import Launchers
from slurm_resilience.runtime.local_ranks import LocalRank, LocalRanks, tail
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.messages import (
    BEAT_EVERY_S,
    Exit,
    Fact,
    Hello,
    Kill,
    Launch,
    Launched,
    LaunchFailed,
    Message,
    Order,
    Quit,
    Refused,
    Stopped,
    Store,
    StoreFailed,
    StoreReady,
    Warm,
    Warned,
)
from slurm_resilience.runtime.node_folder import NodeFolder
from slurm_resilience.runtime.preload import ImportWatch, read_learned, write_learned
from slurm_resilience.runtime.processes import (
    WARNING_SIGNALS,
    become_subreaper,
    carrying,
    descendants,
    look,
    reap,
    send_signal,
)
from slurm_resilience.runtime.stopping import Stop
from slurm_resilience.runtime.uplink import Uplink

_FROZEN_S = 1.0  # a turn of the loop that took longer means that this process was stopped, or starved
_GRACE_AFTER_FREEZE_S = 0.5
_LEASE_MARGIN_S = 0.75  # what is left for killing before the supervisor relaunches elsewhere
_TAIL_S = 0.5
_LAST_WORDS_S = 1.0
_STUCK_FORK_S = 2.0
_LEARN_AFTER_S = 20.0  # a program without a Run never says that it took a step


class Agent:
    """The node's side of a run.  :meth:`run` returns the exit code."""

    def __init__(self, run_dir: Path, node: str, run: Mapping[str, Any], guardian: int) -> None:
        self._run_dir, self._node, self._guardian = run_dir, node, guardian
        self._run_id: str = run["run_id"]
        limits = run["config"]["limits"]
        self._silence_s: float = limits["agent_silence_s"]
        self._lost_s: float = limits["node_silence_s"]
        self._orphan_s: float = limits["orphan_s"]
        self._wrap: list[str] = list(run.get("wrap") or [])
        self._identity = {"RESILIENCE_RUN_ID": self._run_id, "RESILIENCE_NODE": node}
        become_subreaper()
        self._catch_signals()
        self._folder = NodeFolder(self._run_id, node)
        self._clear_leftovers()
        self._loop = Loop()
        self._loop.watch(self._wakeup, self._signals_came)
        self._facts = FactReceiver(self._folder.facts)
        self._loop.watch(self._facts, self._facts_came)
        self._uplink = Uplink(self._loop, run_dir, greet=self._greet, welcomed=self._welcomed, obey=self._obey, say=self._say)
        self._launchers = self._make_launchers(run)
        self._ranks: LocalRanks | None = None
        self._pending: Launch | None = None
        self._pending_store: int | None = None
        self._stores: dict[int, int] = {}  # process number -> attempt
        self._store_hosts: dict[int, StoreHost] = {}  # the cold ones among them, by attempt
        self._stop: Stop | None = None
        self._fence = 0
        self._tails = 0
        self._grace_until = 0.0
        self._imports: ImportWatch | None = None
        self._learned: list[str] = []
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
            if now - before > _FROZEN_S:
                self._was_frozen(now, now - before)
            before = now
            self._bury()
            self._uplink.tick(now)
            self._launchers.tick(now)
            self._advance(now)
            if now >= self._beat_at:
                self._beat(now)
            self._check_lease(now)
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
        self._uplink.beat(self._ranks.attempt if self._ranks else 0, self._ranks.progress() if self._ranks else {})
        if self._ranks is not None and self._imports is not None:
            self._learn(now, self._ranks, self._imports)

    def _was_frozen(self, now: float, seconds: float) -> None:
        """A stopped process wakes up with an old view; the sockets have been read by now.

        Say that we live, and give the answer a moment, as long as the supervisor cannot have given this node up.
        """
        self._say(f"this agent did not run for {seconds:.1f} s")
        self._grace_until = min(now + _GRACE_AFTER_FREEZE_S, self._uplink.lease_from + self._lost_s - _LEASE_MARGIN_S)
        self._beat(now)

    def _check_lease(self, now: float) -> None:
        age = now - self._uplink.lease_from
        if self._ranks is not None or self._pending is not None:
            if age > self._silence_s and now > self._grace_until and (self._stop is None or self._stop.why == "kill"):
                self._say(f"nothing heard from the supervisor for {age:.1f} s: stopping what runs here")
                self._begin_stop(max(self._fence, 1), "silence")
                self._uplink.drop("silence")
        elif age > self._silence_s and now > self._grace_until and self._uplink.up:
            self._uplink.drop("silence")
        if age > self._orphan_s and self._stop is None:
            self._end(f"no supervisor for {age:.0f} s", ExitCode.NODE_LOST)

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
        ranks = self._ranks
        job_id, restart = self._uplink.job
        return Hello.build(
            token, node=self._node, pid=os.getpid(), boot_id=boot_id(), job_id=job_id, restart=restart, address=address,
            warm=self._launchers.warm is True, cold_reason="" if self._launchers.warm else self._launchers.reason,
            attempt=ranks.attempt if ranks else 0, ranks=[rank.rank for rank in ranks.alive()] if ranks else [],
        )  # fmt: skip

    def _welcomed(self) -> None:
        """What an earlier supervisor may have missed comes again."""
        if self._launchers.warm is not None:
            self._tell_warmth()
        for rank in self._ranks.ranks.values() if self._ranks else ():
            if rank.ended is not None:
                self._uplink.tell(rank.ended)
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
            self._pending_store = message.attempt
        elif isinstance(message, Kill):
            if self._ranks is not None and self._ranks.attempt > message.attempt:
                self._refuse(message.kind, message.attempt, f"attempt {self._ranks.attempt} runs here")
                return
            self._fence = max(self._fence, message.attempt)
            self._begin_stop(message.attempt, "kill", message.grace_s)
        elif isinstance(message, Order):
            if self._ranks is None or self._ranks.attempt != message.attempt:
                self._refuse(message.kind, message.attempt, "that attempt does not run here")
                return
            self._ranks.order(stop=message.stop, save=message.save, deadline=message.deadline, cause=message.cause)
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
        if self._stop is not None and not self._proven(self._stop):
            self._start_store()
            return
        self._start_store()
        launch = self._pending
        if launch is None:
            return
        if self._ranks is not None:
            self._begin_stop(launch.attempt - 1, "launch")
            return
        if self._launchers.warm is None and launch.wait_warm:
            return
        self._pending = None
        self._start(launch)

    def _start(self, launch: Launch) -> None:
        job_id, restart = self._uplink.job
        try:
            self._ranks = LocalRanks.prepare(
                launch, self._folder, base=os.environ, run_dir=self._run_dir, run_id=self._run_id,
                node=self._node, job_id=job_id, restart=restart,
            )  # fmt: skip
        except (OSError, ValueError, TypeError) as error:
            self._uplink.tell(LaunchFailed(launch.attempt, f"cannot prepare the ranks: {error}"))
            return
        self._imports = ImportWatch(self._folder.imports(launch.attempt))
        link = self._launchers.current
        why = self._launchers.reason if self._launchers.warm is not True else ""
        if not why and not same_interpreter(self._ranks.command, self._command):
            why = "another interpreter, or other flags of it, than those that the launcher was started with"
        for rank in self._ranks.ranks.values():
            if why or link is None:
                self._start_cold(rank, why)
            else:
                rank.link = link
                link.pending += 1
                link.send(m="fork", env=rank.environment, **rank.request)
        self._announce()

    def _start_cold(self, rank: LocalRank, why: str) -> None:
        assert self._ranks is not None
        self._ranks.cold = why or "no launcher"
        rank.link = None
        try:
            rank.pid = start_cold(rank, self._ranks, self._wrap)
        except OSError as error:
            self._uplink.tell(LaunchFailed(self._ranks.attempt, f"cannot start rank {rank.rank}: {error}"))
            self._begin_stop(self._ranks.attempt, "launch_failed")
            return
        rank.process = look(rank.pid)

    def _announce(self) -> None:
        ranks = self._ranks
        if ranks is None or ranks.announced or not ranks.all_started():
            return
        ranks.announced = True
        pids = {str(rank.rank): rank.pid for rank in ranks.ranks.values()}
        seconds = round(time.monotonic() - ranks.began, 4)
        self._uplink.tell(Launched(ranks.attempt, pids, not ranks.cold, ranks.cold, seconds))

    def _start_store(self) -> None:
        attempt, warm = self._pending_store, self._launchers.warm
        if attempt is None or warm is None:
            return
        self._pending_store = None
        link = self._launchers.current
        if warm and link is not None:
            link.pending += 1
            link.send(m="store", attempt=attempt)
        else:
            self._start_store_cold(attempt)

    def _start_store_cold(self, attempt: int) -> None:
        python = self._command
        command = [*self._wrap, python.interpreter, *python.flags] if python else [sys.executable]
        try:
            host = StoreHost.start(command, log=self._launcher_log, attempt=attempt)
        except OSError as error:
            self._uplink.tell(StoreFailed(attempt, f"cannot listen or fork: {error}"))
            return
        self._store_hosts[attempt] = host
        self._stores[host.pid] = attempt
        self._loop.watch(host, lambda: self._store_spoke(host))

    def _store_spoke(self, host: StoreHost) -> None:
        self._loop.forget(host)
        if host.is_ready():
            self._uplink.tell(StoreReady(host.attempt, host.port))
        else:
            self._uplink.tell(StoreFailed(host.attempt, f"the store's host ended before it listened; see {self._launcher_log}"))
        host.close()
        self._store_hosts.pop(host.attempt, None)

    # --- launchers ----------------------------------------------------------------------------------------------------

    def _make_launchers(self, run: Mapping[str, Any]) -> Launchers:
        config = run["config"]
        self._launcher_log = self._run_dir / "logs" / f"launcher-{self._node}.log"
        self._command = parse_python(run["argv"])
        command: list[str] | None = None
        reason = ""
        if not config["warm"]:
            reason = "warm = false in the configuration"
        elif self._command is None:
            reason = f"{run['argv'][0]!r} is not a Python command that can be forked"
        elif self._wrap:
            command = [*self._wrap, self._command.interpreter, *self._command.flags]
        else:
            interpreter = find_program(self._command.interpreter, os.environ)
            if interpreter is None:
                reason = f"there is no {self._command.interpreter!r} on the agent's PATH"
            else:
                command = [interpreter, *self._command.flags]
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
        kind, attempt = message["m"], message["attempt"]
        ranks = self._ranks if self._ranks is not None and self._ranks.attempt == attempt else None
        if kind == "ended":
            link.children.discard(message["pid"])
            rank = ranks.by_pid(message["pid"]) if ranks else None
            if message["what"] == "store":
                self._store_ended(message["pid"])
            elif rank is not None:
                self._rank_ended(rank, message["status"])
            return
        link.pending -= 1
        if kind == "store_ready":
            link.children.add(message["pid"])
            self._stores[message["pid"]] = attempt
            self._uplink.tell(StoreReady(attempt, message["port"]))
        elif kind == "forked":
            link.children.add(message["pid"])
            if ranks is not None:
                rank = ranks.ranks[message["rank"]]
                rank.pid, rank.process = message["pid"], look(message["pid"])
                self._announce()
        elif kind == "cold" and message["rank"] < 0:
            self._start_store_cold(attempt)
        elif kind == "cold" and ranks is not None and self._stop is None:
            self._start_cold(ranks.ranks[message["rank"]], message["why"])
            self._announce()

    def _launcher_lost(self, link: LauncherLink) -> None:
        """Its ranks died with it; what they left behind is killed with the attempt."""
        for process in descendants(os.getpid()):
            if process.pid in link.pids:
                send_signal(process, signal.SIGKILL)
        link.pending = 0
        self._bury()
        ranks = self._ranks
        for rank in list(ranks.ranks.values()) if ranks else []:
            if rank.link is link and not rank.gone and rank.pid is not None and look(rank.pid) is None:
                self._rank_ended(rank, None)
        if ranks is not None and not ranks.all_started() and any(rank.link is link for rank in ranks.ranks.values()):
            self._uplink.tell(LaunchFailed(ranks.attempt, "the launcher died while it was forking"))
            self._begin_stop(ranks.attempt, "launch_failed")

    def _learn(self, now: float, ranks: LocalRanks, imports: ImportWatch) -> None:
        """Have the next launcher know what these ranks had to import by themselves."""
        first = ranks.ranks[min(ranks.ranks)]
        if first.gone or (first.page.read().step < 1 and now < ranks.began + _LEARN_AFTER_S):
            return
        fresh = imports.fresh()
        if fresh:
            self._learned = [*dict.fromkeys([*self._learned, *fresh])]
            if 0 in ranks.ranks:
                run_dir, names = self._run_dir, [*dict.fromkeys([*self._launchers.learned, *self._learned])]
                self._loop.aside(lambda: write_learned(run_dir, names), lambda _: None, within_s=10.0)
        if self._learned:
            self._launchers.renew(self._learned)

    # --- ending -------------------------------------------------------------------------------------------------------

    def _bury(self) -> None:
        """Take note of children that ended: cold ranks, launchers, helpers, and orphans that came to us."""
        for pid, status in reap():
            rank = self._ranks.by_pid(pid) if self._ranks is not None else None
            if rank is not None:
                self._rank_ended(rank, status)
            elif pid in self._stores:
                self._store_ended(pid)

    def _store_ended(self, pid: int) -> None:
        attempt = self._stores.pop(pid, None)
        if attempt is not None and self._stop is None and attempt >= self._fence and attempt not in self._store_hosts:
            self._uplink.tell(StoreFailed(attempt, "the store's host died"))

    def _rank_ended(self, rank: LocalRank, status: int | None) -> None:
        assert self._ranks is not None
        rank.gone = True
        if self._stop is not None and rank.pid in self._stop.killed:
            return
        found = self._ranks.exit_of(rank, status)
        log = rank.log

        def tell(lines: list[str] | None) -> None:
            self._tails -= 1
            rank.ended = Exit(**{**vars(found), "tail": [*(lines or []), *found.tail]})
            self._uplink.tell(rank.ended)

        self._tails += 1
        self._loop.aside(lambda: tail(log), tell, within_s=_TAIL_S)

    def _begin_stop(self, attempt: int, why: str, grace_s: float = 0.0) -> None:
        if self._pending is not None and self._pending.attempt <= attempt:
            self._pending = None
        if self._pending_store is not None and self._pending_store <= attempt:
            self._pending_store = None
        if self._stop is not None:
            self._stop.hurry(attempt, grace_s)
            return
        leaders = [rank.process for rank in self._ranks.alive() if rank.process is not None] if self._ranks else []
        if grace_s > 0 and self._ranks is not None:
            self._ranks.order(stop=True, save=0, deadline=time.time() + grace_s, cause=why)
        self._stop = Stop(attempt, why, grace_s=grace_s, leaders=leaders)
        self._advance(time.monotonic())

    def _proven(self, stop: Stop) -> bool:
        """Go on with the stop; True when nothing of the attempt is alive any more, which is then told."""
        spare = self._launchers.processes() | set(self._loop.helpers())
        spare |= {pid for pid, attempt in self._stores.items() if attempt > stop.attempt}
        if not stop.tick(spare):
            if complaint := stop.complaint():
                self._say(complaint)
            return False
        if self._launchers.pending():  # what it forks now would come after the proof
            if stop.seconds > _STUCK_FORK_S:
                self._launchers.drop_stuck()
            return False
        self._bury()
        if stop.seconds < _LAST_WORDS_S and (self._tails or (self._ranks is not None and self._ranks.alive())):
            return False  # how they ended is on its way from the launcher, and what they said last from their logs
        if self._ranks is not None:
            self._ranks.close()
        self._ranks, self._imports, self._stop = None, None, None
        self._say(
            f"attempt {stop.attempt} is stopped ({stop.why}): {len(stop.killed)} processes killed in {stop.seconds:.3f} s"
        )
        self._uplink.tell(Stopped(stop.attempt, len(stop.killed), round(stop.seconds, 4), stop.why))
        return True

    # --- signals, facts, log ------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        """Handlers do nothing; the number of each signal arrives as a byte in the loop."""
        self._wakeup, wake = socket.socketpair()
        self._wakeup.setblocking(False)
        wake.setblocking(False)
        self._wake = wake
        for sig in (*WARNING_SIGNALS, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(sig, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def _signals_came(self) -> None:
        for number in sorted(set(self._wakeup.recv(4096))):
            if number in WARNING_SIGNALS:
                name = signal.Signals(number).name
                self._say(f"got {name}")
                self._uplink.tell(Warned(name, time.time()))

    def _facts_came(self) -> None:
        now = time.time()
        for fact in self._facts.receive():
            kind, attempt, rank, fields = fact["kind"], fact.get("attempt"), fact.get("rank"), fact.get("fields")
            if not isinstance(attempt, int) or not isinstance(rank, int) or not isinstance(fields, dict):
                self._say(f"a datagram that is no fact: {str(fact)[:200]}")
            elif self._ranks is None or attempt != self._ranks.attempt:
                self._say(f"a fact of attempt {attempt} came too late: {kind}")
            else:
                self._uplink.tell(Fact(attempt, rank, kind, fields, now))

    def _clear_leftovers(self) -> None:
        """Kill what an earlier agent of this run left on this node, and wait for the proof, before anything is started."""
        ours = {os.getpid(), self._guardian}
        parent = look(self._guardian)
        while parent is not None and parent.pid > 1:
            ours.add(parent.pid)
            parent = look(parent.parent)
        deadline = time.monotonic() + 10.0
        while left := [process for process in carrying(self._identity) if process.pid not in ours]:
            for process in left:
                self._say(f"killing process {process.pid}, left by an earlier agent")
                send_signal(process, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise ResilienceError(
                    f"Processes of an earlier agent of this run are alive on {self._node} and cannot be killed",
                    evidence=", ".join(f"{process.pid} in state {process.state}" for process in left),
                    remedy="state D waits for a device or a file system: leave this node out",
                )
            time.sleep(0.02)

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
        guardian = guard(logs / f"agent-{args.node}.log")
        return Agent(run_dir, args.node, run, guardian).run()
    except ResilienceError as error:
        print(f"agent on {args.node}: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
