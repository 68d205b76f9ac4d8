"""Where a job is rehearsed: a real Slurm on this machine, or this machine alone."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from slurm_resilience.errors import ConfigError, ResilienceError, SandboxError
from slurm_resilience.integrations.own_file import PLACEHOLDER, VARIABLE
from slurm_resilience.observe.events import read_events
from slurm_resilience.rehearse.verdict import Blow
from slurm_resilience.rehearse.wish import Wish, words
from slurm_resilience.sandbox.cluster import Sandbox
from slurm_resilience.sandbox.lifecycle import USER

_T = TypeVar("_T")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "")


class Stage(Protocol):
    """``run_dir`` is the run's folder, from :meth:`start` on."""

    run_dir: Path

    def start(self) -> None:
        """Begin the job."""

    def deal(self, fault: str) -> Blow:
        """Make the fault happen.  Raises :class:`ResilienceError` when it cannot."""

    def mend(self, fault: str) -> None:
        """Undo what of the fault would spoil the next one."""

    def over(self) -> str:
        """How the job has ended; "" while it goes on."""

    def close(self) -> None:
        """Nothing of it runs any more; its folder stays."""


class OnSlurm:
    """The sandbox ``name``, brought up for this and taken down again.  The job is alice's."""

    def __init__(self, wish: Wish, *, name: str = "rehearse") -> None:
        self._wish = wish
        self._was_up = name in Sandbox.names()
        self._sandbox = Sandbox.up(nodes=max(2, wish.most_nodes), name=name)
        self._sandbox.heal()
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-resilience-rehearsal-"))
        account = pwd.getpwnam(USER)
        os.chown(self._folder, account.pw_uid, account.pw_gid)
        self._folder.chmod(0o755)
        self.run_dir = self._folder / "run"
        self._job = ""
        self._off: list[str] = []

    def start(self) -> None:
        script = self._wish.script.resolve()
        if self._alice("test", "-r", str(script)).returncode != 0:
            raise ConfigError(
                f"{USER} cannot read {script}", evidence="jobs in the sandbox are those of this ordinary user",
                remedy="put it where everybody can read it; /root is no such place",
            )  # fmt: skip
        batch = script if not self._wish.is_python else self._render()
        environment = {"RUN_DIR": str(self.run_dir), "RESILIENCE_RUN_DIR": str(self.run_dir), "OMP_NUM_THREADS": "1"}
        argv = ["sbatch", "--parsable", "--partition=low", f"--output={self._folder}/job.log", str(batch)]
        done = self._sandbox.exec(argv, cwd=script.parent, env=environment, timeout=120)
        if done.returncode != 0:
            raise SandboxError("Slurm refuses the job", evidence=" ".join(done.stderr.split()))
        self._job = done.stdout.strip().partition(";")[0]

    def _render(self) -> Path:
        from slurm_resilience.submit.rendering import render

        wish = self._wish
        values = {
            "job_name": "rehearsal", "nodes": wish.nodes, "time": "08:00:00", "ranks_per_node": str(wish.ranks_per_node),
            "resilience": shlex.join([sys.executable, "-m", "slurm_resilience"]), "options": wish.options,
            "command": shlex.join(words(wish, sys.executable)), "lead_s": "60",
        }  # fmt: skip
        name = "torchrun" if wish.checkpoint_file else "multi-node"
        if wish.checkpoint_file:
            values |= {"checkpoint_file": wish.checkpoint_file, "resume_with": wish.resume_with}
        path = self._folder / "job.sbatch"
        path.write_text(render(name, values), encoding="utf-8")
        path.chmod(0o755)
        return path

    def deal(self, fault: str) -> Blow:
        now = time.time()
        if fault == "time-limit":
            return self._limit()
        if fault == "preempt":
            happened = self._sandbox.fault("preempt", seconds=5.0)
            return Blow(fault, happened["submitted_at"], f"job {happened['job']}")
        if fault == "power-off":
            node = self._expendable()
            self._sandbox.fault("power-off", node)
            self._off.append(node)
            return Blow(fault, now, node)
        happened = self._sandbox.fault(fault, job=self._job)
        return Blow(fault, now, str(happened.get("node", "")))

    def _expendable(self) -> str:
        from ClusterShell.NodeSet import NodeSet

        job = self._sandbox.job(self._job)
        nodes = sorted(NodeSet(job["NodeList"]))
        others = [node for node in nodes if node != job.get("BatchHost")]
        return str((others or nodes)[-1])

    def _limit(self) -> Blow:
        """A limit one to two minutes from now, as root may set it; the warning comes a minute before."""
        job = self._sandbox.job(self._job)
        spent = [int(part) for part in job["RunTime"].replace("-", ":").split(":")]
        minutes = spent[-3] * 60 + spent[-2] if len(spent) >= 3 else spent[0]
        self._sandbox.slurm(["scontrol", "update", f"JobId={self._job}", f"TimeLimit={minutes + 2}"])
        warned = self._wait_for_event("warning_received", time.time(), 240)
        return Blow("time-limit", warned, f"after {minutes + 2} minutes")

    def _wait_for_event(self, name: str, since: float, within_s: float) -> float:
        def look() -> float:
            return next(
                (event["t"] for event in read_events(self.run_dir) if event["event"] == name and event["t"] >= since), 0.0
            )

        return self._sandbox.wait_for(look, within_s, what=f"The event {name}")

    def mend(self, fault: str) -> None:
        if fault == "time-limit":
            self._sandbox.slurm(["scontrol", "update", f"JobId={self._job}", "TimeLimit=8:00:00"], check=False)
        while self._off:
            node = self._off.pop()
            self._sandbox.fault("power-on", node)

    def over(self) -> str:
        job = self._sandbox.job(self._job)
        state = job.get("JobState", "")
        if state not in _ENDED or job.get("Restarts", "0") == "" or state == "":
            return ""
        said = f"job {self._job} is {state}, exit code {job.get('ExitCode', '?')}; its log: {self._folder}/job.log"
        home = self._wish.script.resolve().parent
        if self._alice("test", "-w", str(home)).returncode != 0:
            said += f". It runs in {home} as {USER}, who may not write there"
        return said

    def close(self) -> None:
        if self._was_up:
            self._sandbox.heal()
        else:
            self._sandbox.down()

    def _alice(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return self._sandbox.exec(argv, cwd="/")


class OnThisMachine:
    """``slurm-resilience run --local``: no Slurm, no root."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-resilience-rehearsal-"))
        self.run_dir = self._folder / "run"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        wish = self._wish
        argv = [sys.executable, "-m", "slurm_resilience", "run", "--local", str(wish.most_nodes), "--nodes", wish.nodes]
        argv += ["--ranks-per-node", str(wish.ranks_per_node), "--run-dir", str(self.run_dir), *shlex.split(wish.options)]
        if wish.checkpoint_file:
            argv += ["--checkpoint-file", wish.checkpoint_file, f"--resume-with={wish.resume_with}"]
        with open(self._folder / "job.log", "wb") as log:
            self._process = subprocess.Popen(
                [*argv, "--", *words(wish, sys.executable)], cwd=wish.script.resolve().parent, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def deal(self, fault: str) -> Blow:
        rank, pid = min(self._ranks())
        at = time.time()
        try:
            os.kill(pid, signal.SIGSTOP if fault == "hang-rank" else signal.SIGKILL)
        except ProcessLookupError:
            raise SandboxError(f"Rank {rank} is gone already", evidence=f"there is no process {pid}") from None
        return Blow(fault, at, f"rank {rank}")

    def _ranks(self) -> list[tuple[int, int]]:
        """Number and process of each rank of the newest attempt."""
        events = read_events(self.run_dir) if self.run_dir.is_dir() else []
        pids: dict[str, dict[str, int]] = next(
            (event["pids"] for event in reversed(list(events)) if event["event"] == "ranks_launched"), {}
        )
        return [(int(rank), int(pid)) for node in pids.values() for rank, pid in dict(node).items()]

    def mend(self, fault: str) -> None:
        """The killed are buried by their agent."""

    def over(self) -> str:
        code = self._process.poll() if self._process is not None else None
        return "" if code is None else f"the run has ended with code {code}; its log: {self._folder}/job.log"

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            deadline, killed = time.monotonic() + 60, set[int]()
            while self._process.poll() is None and time.monotonic() < deadline:
                # nobody needs what they would save now, and a script without a Run never ends by itself
                for pid in {pid for _, pid in self._ranks()} - killed:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.5)
            self._process.kill()
            self._process.wait()


def rehearse(stage: Stage, wish: Wish, *, say: Callable[[str], None]) -> list[Blow]:
    """Deal every fault, one after the other, each when the job trains and has saved; what was dealt, and what went wrong."""
    stage.start()
    blows: list[Blow] = []
    since = 0.0
    if wish.never_told_its_file:
        say(f"{wish.script.name} is to save into {VARIABLE}: it does not mention that, and --args has no {PLACEHOLDER} either")
    for fault in wish.faults:
        say(f"waiting until the job trains and has a checkpoint, for {fault} …")
        try:
            _wait(stage, lambda since=since: _has_saved(stage.run_dir, since), wish.within_s, "a new checkpoint", say)  # type: ignore[misc]
        except ResilienceError as error:
            blows.append(Blow(fault, 0.0, failed=f"it could not be rehearsed: {error}"))
            break
        try:
            blow = stage.deal(fault)
        except ResilienceError as error:
            blows.append(Blow(fault, 0.0, failed=f"it could not be dealt: {error}"))
            continue
        say(f"{fault}{f' ({blow.where})' if blow.where else ''}")
        try:
            _wait(stage, lambda at=blow.at: _goes_on(stage.run_dir, at), wish.within_s, "its going on", say)  # type: ignore[misc]
        except ResilienceError as error:
            blow = Blow(blow.fault, blow.at, blow.where, failed=str(error))
        blows.append(blow)
        stage.mend(fault)
        if blow.failed:
            break
        since = blow.at
    left = wish.faults[len(blows) :]
    return [*blows, *(Blow(fault, 0.0, failed="it was not rehearsed: the job did not get so far") for fault in left)]


def _has_saved(run_dir: Path, since: float) -> bool:
    """Newer than the fault before, and of the attempt that runs now."""
    events = list(read_events(run_dir)) if run_dir.is_dir() else []
    started = max((event["t"] for event in events if event["event"] == "ranks_launched"), default=float("inf"))
    return any(event["event"] == "checkpoint_committed" and event["t"] > max(since, started) for event in events)


def _goes_on(run_dir: Path, at: float) -> bool:
    """Every rank has its checkpoint, or has begun again; the first step of a ``Run`` is waited for with the next checkpoint."""
    events = [event for event in read_events(run_dir) if event["t"] > at]
    loaded = [event["t"] for event in events if event["event"] in ("resumed", "started_fresh")]
    return bool(loaded) and any(
        event["event"] in ("first_step", "checkpoint_committed") and event["t"] > loaded[0] for event in events
    )


def _wait(stage: Stage, condition: Callable[[], bool], within_s: float, what: str, say: Callable[[str], None]) -> None:
    """Also tells of saves that failed meanwhile: they may be all that there is to wait for."""
    deadline, began = time.monotonic() + within_s, time.time()
    failed = ""
    while not condition():
        newest = _newest(stage.run_dir, "checkpoint_failed", "error", began)
        if newest and newest != failed:
            failed = newest
            say(f"a save failed: {failed}")
        ended = stage.over()
        if ended and not condition():
            why = _newest(stage.run_dir, "run_failed", "reason")
            raise SandboxError(f"The job is over before {what}{f': {why}' if why else ''}", evidence=ended)
        if time.monotonic() > deadline:
            if failed:
                raise SandboxError(f"No sign of {what} in {within_s:g} s. {failed}")
            raise SandboxError(f"No sign of {what} in {within_s:g} s", evidence=f"the events in {stage.run_dir}",
                               remedy="--within SECONDS waits longer; does the script save often enough?")  # fmt: skip
        time.sleep(0.2)


def _newest(run_dir: Path, name: str, word: str, since: float = 0.0) -> str:
    """What the newest event of this name says; "" without one."""
    events = read_events(run_dir) if run_dir.is_dir() else []
    said = [event for event in events if event["event"] == name and event["t"] >= since]
    return str(said[-1].get(word, "")) if said else ""
