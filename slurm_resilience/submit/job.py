"""``ResilientJob``: the submitted run as an object, right over any number of attempts, requeues and owners."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TypeVar

from submitit.core.utils import JobPaths
from submitit.slurm.slurm import SlurmJob

from slurm_resilience._atomic import read_json, write_json_atomic
from slurm_resilience.errors import Cause, ConfigError, ResilienceError
from slurm_resilience.observe.events import read_events
from slurm_resilience.observe.failures import MOVED_BY_HAND, word_of
from slurm_resilience.runtime.resubmit import JOB_FILE
from slurm_resilience.runtime.run_folder import RunFolder, RunStatus
from slurm_resilience.submit.handles import DoneHandle, Handle, LocalHandle, Look, SlurmHandle
from slurm_resilience.submit.payload import CallFolder, Result

VERSION = 1
FILE_NAME = JOB_FILE
# A network file system may show a file on another node some seconds late.
_RESULT_PATIENCE_S = 15.0
_LOOK_EVERY_S = (0.5, 10.0)

R = TypeVar("R", covariant=True)


class JobFailed(ResilienceError):
    """The run is over and has no result.  ``cause`` is why; ``traceback`` that of the rank that failed first, if one did."""

    def __init__(
        self, what: str, *, evidence: str = "", remedy: str = "", cause: Cause = Cause.UNKNOWN, traceback: str = ""
    ) -> None:
        super().__init__(what, evidence=evidence, remedy=remedy)
        self.cause = cause
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return (_failed_again, (self.what, self.evidence, self.remedy, self.cause, self.traceback))


def _failed_again(what: str, evidence: str, remedy: str, cause: Cause, traceback: str) -> JobFailed:
    return JobFailed(what, evidence=evidence, remedy=remedy, cause=cause, traceback=traceback)


class RunPaths(JobPaths):
    """submitit's names for our files."""

    def __init__(self, run_dir: Path, job_id: str) -> None:
        super().__init__(run_dir / "call", job_id=job_id, task_id=0)
        self._run_dir = run_dir

    @property
    def submission_file(self) -> Path:
        return self._run_dir / "call" / "submission.sh"

    @property
    def submitted_pickle(self) -> Path:
        return self._run_dir / "call" / "function.pkl"

    @property
    def result_pickle(self) -> Path:
        return self._run_dir / "call" / "result.pkl"

    @property
    def stdout(self) -> Path:
        return self._run_dir / "logs" / f"job-{self.job_id}.out"

    @property
    def stderr(self) -> Path:
        return self.stdout


class ResilientJob(SlurmJob[R]):
    """A run that was submitted.  Pickles, and comes back from its folder with :meth:`from_dir`.

    Nothing is final before the job is: a result that an attempt left behind does not count while another may follow.
    """

    def __init__(self, run_dir: str | Path, description: dict[str, Any]) -> None:
        self._run_dir = Path(run_dir)
        self._description = description
        self._handle: Handle | None = None
        self._last: Look | None = None
        self._last_at = float("-inf")
        super().__init__(self._run_dir / "call", str(description["job_id"]))
        self._paths = RunPaths(self._run_dir, self.job_id)

    @classmethod
    def from_dir(cls, run_dir: str | Path) -> ResilientJob[Any]:
        """The job of a run folder.  Raises :class:`ConfigError` when nothing was submitted from there."""
        path = Path(run_dir).expanduser().absolute()
        description = read_json(path / FILE_NAME)
        if not isinstance(description, dict) or "job_id" not in description:
            raise ConfigError(
                f"{path} is not the folder of a submitted run",
                evidence=f"there is no {FILE_NAME} in it",
                remedy="give the run folder itself, the one with run.json in it",
            )
        if description["v"] > VERSION:
            raise ConfigError(f"{path / FILE_NAME} was written by a newer release", evidence=f"version {description['v']}")
        return cls(path, description)

    def save_description(self) -> None:
        """Make the job known to :meth:`from_dir`."""
        write_json_atomic(self._run_dir / FILE_NAME, {"v": VERSION, **self._description})

    # -- who --------------------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """The run's own name; it stays when job ids change or come round again."""
        return str(self._description["run_id"])

    @property
    def run_dir(self) -> Path:
        return self._run_dir

    @property
    def cluster(self) -> str:
        """ "slurm", "local" or "debug"."""
        return str(self._description["cluster"])

    # -- how it stands ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Slurm's word for the job as it is now; never a final one before the job is over, UNKNOWN when nobody can tell."""
        return str(self._look().state)

    @property
    def status(self) -> RunStatus | None:
        """How the run stands, in the words of its last supervisor."""
        return RunFolder(self._run_dir).status()

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """What was launched, oldest first: attempt, restart, nodes, world, start, and the cause that ended it, once it has.

        One whose supervisor died with its node left no word of its end: then accounting is asked, where there is any.
        """
        out: dict[int, dict[str, Any]] = {}
        for event in self.events():
            number = event["attempt"]
            if event["event"] == "attempt_started":
                out[number] = {"attempt": number, "restart": event["restart"], "started_at": event["t"],
                               "nodes": event.get("nodes"), "world": event.get("world")}  # fmt: skip
            elif number in out and event["event"] in ("fault_detected", "warning_explained") and "cause" in event:
                out[number].setdefault("cause", word_of(event))
            elif number in out and event["event"] == "attempt_stopped":
                out[number]["stopped_at"] = event["t"]
        newest = max((each["restart"] for each in out.values()), default=0)
        silent = [each for each in out.values() if "cause" not in each and each["restart"] < newest]
        handle = self._get_handle() if silent else None
        ends = handle.ends() if isinstance(handle, SlurmHandle) else []
        for each in silent:
            cause = ends[each["restart"]] if each["restart"] < len(ends) else None
            if cause is not None:
                each["cause"] = str(cause)
        return list(out.values())

    def events(self) -> list[dict[str, Any]]:
        """The facts of the run so far."""
        return list(read_events(self._run_dir))

    def done(self, force_check: bool = False) -> bool:
        """Whether the job is over for good."""
        return self._look(force=force_check).final

    def wait(self, timeout: float | None = None) -> bool:  # type: ignore[override]  # more than submitit's, which has no time-out
        """Wait until the job is over; False when ``timeout`` seconds were not enough."""
        until = None if timeout is None else time.monotonic() + timeout
        pause, longest = _LOOK_EVERY_S
        while not self.done(force_check=True):
            left = pause if until is None else min(pause, until - time.monotonic())
            if left <= 0:
                return False
            time.sleep(left)
            pause = min(pause * 1.5, longest)
        return True

    # -- what came of it --------------------------------------------------------------------------------------------

    def result(self) -> R:
        """Wait, and return what the function returned on rank 0; None for a command.

        Raises :class:`JobFailed` when the run failed.
        """
        failure = self.exception()
        if failure is not None:
            raise failure
        result = self._read_result() if self._is_call() else None
        return result.value if result is not None else None  # type: ignore[return-value]

    @property
    def exit_code(self) -> int | None:
        """The batch script's exit code once the job is over; None before, or when nobody knows."""
        return self._look().exit_code

    def results(self) -> list[R]:
        """submitit's form of :meth:`result`: there is one, of rank 0."""
        return [self.result()]

    def exception(self) -> JobFailed | None:  # type: ignore[override]
        """Wait, and return why there is no result; None when there is one."""
        self.wait()
        look = self._look()
        folder = RunFolder(self._run_dir)
        status = folder.status()
        if status is not None and status.state == "complete":
            if not self._is_call() or self._read_result() is not None:
                return None
            return self._failure(look, status, "the run is complete, but its result is not there")
        return self._failure(look, status, "")

    def stdout(self, attempt: int | None = None, rank: int = 0) -> str | None:
        """What ``rank`` printed, in all attempts one after the other or in one of them; None before there is anything."""
        pattern = "attempt-*" if attempt is None else f"attempt-{attempt:04d}"
        logs = sorted((self._run_dir / "logs").glob(f"{pattern}/rank-{rank:05d}.log"))
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs) if logs else None

    def stderr(self) -> str | None:
        """The job's own log, with what batch script and supervisor said; None before there is anything."""
        try:
            return self._paths.stdout.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def cancel(self, check: bool = True) -> None:
        """End the job for good; it is never requeued after that.  Raises when Slurm could not be told, if ``check``."""
        try:
            self._get_handle().cancel()
        except ResilienceError:
            if check:
                raise

    # -- inside -----------------------------------------------------------------------------------------------------

    def _look(self, *, force: bool = False) -> Look:
        """Ask at most once a second, and never again once the answer is final."""
        now = time.monotonic()
        if self._last is None or (not self._last.final and (force or now - self._last_at > 1.0)):
            self._last, self._last_at = self._get_handle().look(), now
            if self._last.final and self._moved():
                self._last = self._get_handle().look()
        return self._last

    def _moved(self) -> bool:
        """The run goes on in another job: where Slurm did not let this one come back, it was submitted again."""
        description = read_json(self._run_dir / FILE_NAME)
        if not isinstance(description, dict) or description.get("job_id") in (None, self._description["job_id"]):
            return False
        self._description, self._handle = description, None
        self._job_id = str(description["job_id"])
        self._paths = RunPaths(self._run_dir, self.job_id)
        return True

    def _get_handle(self) -> Handle:
        if self._handle is None:
            run, it = RunFolder(self._run_dir), self._description
            if self.cluster == "debug":
                self._handle = DoneHandle(run)
            elif self.cluster == "local":
                self._handle = LocalHandle(int(it["pid"]), started=it["pid_started"], boot=it["boot_id"], run=run)
            else:
                self._handle = SlurmHandle(self.job_id, script=it["script"], submitted_at=it["submitted_at"], run=run)
        return self._handle

    def _is_call(self) -> bool:
        return self._paths.submitted_pickle.exists()

    def _read_result(self) -> Result | None:
        until = time.monotonic() + _RESULT_PATIENCE_S
        while True:
            result = CallFolder(self._run_dir / "call").read_result()
            if result is not None or time.monotonic() >= until:
                return result
            time.sleep(0.5)

    def _failure(self, look: Look, status: RunStatus | None, what: str) -> JobFailed:
        cause = _cause(status, look)
        said = _said(status) if status else "no supervisor ever began"
        error = CallFolder(self._run_dir / "call").last_error()
        evidence = f"Slurm's state is {look.state} ({look.source})" if self.cluster == "slurm" else f"state {look.state}"
        if look.exit_code:
            evidence += f", exit code {look.exit_code}"
        if error is not None:
            message = str(error["message"])
            once = "the error above" if len(message) > 40 and message in (what or said) else f"{error['type']}: {message}"
            evidence += f"; rank {error['rank']} of attempt {error['attempt']} raised {once}"
        return JobFailed(
            f"Run {self.run_id} (job {self.job_id}) has no result: {what or said}",
            evidence=evidence,
            remedy=f"read {self._run_dir / 'logs'}, or job.stdout() and job.stderr()",
            cause=cause,
            traceback=str(error["traceback"]) if error else "",
        )

    def _register_in_watcher(self) -> None:
        """submitit would ask sacct for everything; we ask the controller, and sacct only for what it has forgotten."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_last": None, "_last_at": float("-inf")}

    def __repr__(self) -> str:
        return f"ResilientJob<job_id={self.job_id}, run_dir={str(self._run_dir)!r}>"


def _said(status: RunStatus) -> str:
    """Cause and reason; the cause once where the reason begins with it."""
    cause = status.cause or status.state
    return (
        status.reason
        if status.reason.startswith((cause, cause.replace("_", " "), MOVED_BY_HAND))
        else f"{cause}: {status.reason}"
    )


def _cause(status: RunStatus | None, look: Look) -> Cause:
    try:
        return Cause(status.cause) if status else Cause.UNKNOWN
    except ValueError:
        return Cause.CANCELLED if look.state.value == "CANCELLED" else Cause.UNKNOWN
