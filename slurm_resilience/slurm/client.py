"""Asking Slurm and telling Slurm: the protocol that the package uses, and the client that runs Slurm's commands.

Every call is one child process with its own time limit, shielded from signals (:mod:`child`).  A call either returns
what its name says or raises a :class:`SlurmError` kind from :mod:`failures`; it never guesses.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm import child
from slurm_resilience.slurm.failures import NoSuchJob, NoSuchNode, classify
from slurm_resilience.slurm.gpus import gpus_on_nodes
from slurm_resilience.slurm.nodeset import fold
from slurm_resilience.slurm.records import JobRecord, NodeRecord, parse_config, parse_fields, parse_sacct, parse_time
from slurm_resilience.slurm.reservations import Reservation, parse_reservations
from slurm_resilience.slurm.states import JobState, cancelled_by, parse_state

_SACCT_COLUMNS = ["JobID", "JobIDRaw", "State", "ExitCode", "Submit", "Start", "End", "NodeList"]


@dataclass(frozen=True)
class AccountingRecord:
    """One run of a job as accounting keeps it.  It may lag behind the controller by seconds."""

    job_id: str
    state: JobState
    cancelled_by: int | None
    exit_code: int
    exit_signal: int
    submit_at: float | None
    start_at: float | None
    end_at: float | None


@dataclass(frozen=True)
class QueueEntry:
    """One line of the queue: enough to see whether a job needs a closer look."""

    job_id: str
    state: JobState
    reason: str
    comment: str

    @property
    def needs_a_look(self) -> bool:
        """It waits for something else than its turn: a begin time, a release, nodes that do not exist."""
        reason = self.reason.lower()
        return "held" in reason or "hold" in reason or reason.startswith(("begintime", "badconstraints"))


class SlurmClient(Protocol):
    """What the package needs of Slurm.  Job ids are in the form of :attr:`SlurmEnvironment.job_id`."""

    def job(self, job_id: str) -> JobRecord:
        """The controller's record.  Raises NoSuchJob when it has none."""
        ...

    def queue(self, user: str) -> list[QueueEntry]:
        """That user's jobs that are not over; tasks of an array that never started are left out."""
        ...

    def pending(self, user: str) -> list[JobRecord]:
        """That user's jobs in the queue, held ones included."""
        ...

    def jobs(self, user: str) -> list[JobRecord]:
        """That user's jobs that wait, run or are completing."""
        ...

    def history(self, job_id: str) -> list[AccountingRecord]:
        """All runs of the job that accounting knows, oldest first; empty when it knows none."""
        ...

    def nodes(self, names: Iterable[str] = ()) -> dict[str, NodeRecord]:
        """Those of ``names`` that exist (all nodes when empty)."""
        ...

    def partition(self, name: str) -> dict[str, str]:
        """The settings of a partition."""
        ...

    def qos(self, name: str) -> dict[str, str]:
        """PreemptMode and GraceTime of a QOS, as accounting has them; empty for one that it does not know."""
        ...

    def reservations(self) -> list[Reservation]:
        """All reservations, those to come included."""
        ...

    def gpus(self, job_id: str) -> dict[str, int]:
        """GPUs that a running job holds on each of its nodes; empty for one that has none."""
        ...

    def config(self) -> dict[str, str]:
        """The settings of the cluster, by slurm.conf's names."""
        ...

    def update(self, job_id: str, **fields: str) -> None:
        """Change fields of a job, by scontrol's names.  Raises JobNotPending where Slurm allows it only then."""
        ...

    def requeue(self, job_id: str) -> bool:
        """Put a job back into the queue; False when it is there already."""
        ...

    def requeuehold(self, job_id: str) -> bool:
        """The same, and hold it there; False when it is in the queue already (and NOT held by this call)."""
        ...

    def hold(self, job_id: str) -> None:
        """Keep a job from starting (again); a running one runs on.  Raises JobFinished for one that is over."""
        ...

    def release(self, job_id: str) -> None:
        """Let a held job start."""
        ...

    def cancel(self, job_id: str) -> None:
        """End a job for good; ending one that is over is success."""
        ...

    def submit(self, script: str, options: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> str:
        """Queue a script; returns the job id."""
        ...


class CommandClient:
    """The real thing: scontrol, squeue, sacct, scancel and sbatch.  Stateless, safe to use from several threads."""

    def __init__(self, *, timeout_s: float = 10.0) -> None:
        self.timeout_s = timeout_s

    def job(self, job_id: str) -> JobRecord:
        # Those are its words for a task of an array that is there: one that was cancelled before it began.
        answer = self._scontrol("-o", "show", "job", job_id, tolerate=f"Job {job_id} not found")
        records = [JobRecord.parse(line) for line in answer.out.splitlines() if line.startswith("JobId=")]
        for record in records:  # an array or a heterogeneous job gives a line for each part
            if job_id in (record.job_id, record.raw_job_id):
                return record
        if records:
            return records[0]
        raise NoSuchJob(f"Slurm knows no job {job_id}", evidence=answer.evidence)

    def queue(self, user: str) -> list[QueueEntry]:
        # the comment, which may hold anything, stands last
        answer = self._run("squeue", "-h", "-u", user, "-o", "%i|%T|%r|%k")
        entries = []
        for line in answer.out.splitlines():
            job_id, _, rest = line.partition("|")
            state, _, rest = rest.partition("|")
            reason, _, comment = rest.partition("|")
            if job_id and "[" not in job_id:  # [2-9]: the rest of an array that has not started yet, never requeued
                entries.append(QueueEntry(job_id, parse_state(state), reason, "" if comment == "(null)" else comment))
        return entries

    def pending(self, user: str) -> list[JobRecord]:
        return self._records(entry for entry in self.queue(user) if entry.state.waiting)

    def jobs(self, user: str) -> list[JobRecord]:
        return self._records(self.queue(user))

    def _records(self, entries: Iterable[QueueEntry]) -> list[JobRecord]:
        records = []
        for entry in entries:
            try:
                records.append(self.job(entry.job_id))
            except NoSuchJob:  # it went while we looked
                continue
        return records

    def history(self, job_id: str) -> list[AccountingRecord]:
        # -D: every run of a requeued job, not only the newest
        answer = self._run("sacct", "-n", "-P", "-D", "-X", "-j", job_id, "-o", ",".join(_SACCT_COLUMNS))
        records = []
        for row in parse_sacct(answer.out, _SACCT_COLUMNS):
            if job_id not in (row["JobID"], row["JobIDRaw"]):
                continue
            code, _, signal = row["ExitCode"].partition(":")
            records.append(
                AccountingRecord(
                    job_id=row["JobID"],
                    state=parse_state(row["State"]),
                    cancelled_by=cancelled_by(row["State"]),
                    exit_code=int(code or 0),
                    exit_signal=int(signal or 0),
                    submit_at=parse_time(row["Submit"]),
                    start_at=parse_time(row["Start"]),
                    end_at=parse_time(row["End"]),
                )
            )
        return sorted(records, key=lambda record: (record.submit_at or 0.0, record.start_at or float("inf")))

    def nodes(self, names: Iterable[str] = ()) -> dict[str, NodeRecord]:
        wanted = tuple(dict.fromkeys(names))
        try:
            answer = self._scontrol("-o", "show", "node", *([fold(wanted)] if wanted else []), tolerate="not found")
        except NoSuchNode:
            return {}
        records = [NodeRecord.parse(line) for line in answer.out.splitlines() if line.startswith("NodeName=")]
        return {record.name: record for record in records}

    def partition(self, name: str) -> dict[str, str]:
        return parse_fields(self._scontrol("-o", "show", "partition", name).out.strip())

    def qos(self, name: str) -> dict[str, str]:
        columns = ("Name", "PreemptMode", "GraceTime")
        answer = self._run("sacctmgr", "-nP", "show", "qos", name, f"format={','.join(columns)}")
        rows = [dict(zip(columns, line.split("|"), strict=False)) for line in answer.out.splitlines()]
        return next((row for row in rows if row.get("Name") == name), {})

    def reservations(self) -> list[Reservation]:
        return parse_reservations(self._scontrol("-o", "show", "reservation").out)

    def gpus(self, job_id: str) -> dict[str, int]:
        return gpus_on_nodes(self._scontrol("-d", "-o", "show", "job", job_id).out)

    def config(self) -> dict[str, str]:
        return parse_config(self._scontrol("show", "config").out)

    def update(self, job_id: str, **fields: str) -> None:
        words = ("update", f"JobId={job_id}", *(f"{key}={value}" for key, value in fields.items()))
        if "NodeList" not in fields:
            self._scontrol(*words)
            return
        # Shrinking a job makes scontrol leave slurm_job_N_resize.sh and .csh in the current folder.  Source: update_job.c
        with tempfile.TemporaryDirectory(prefix="slurm-resilience-") as folder:
            self._scontrol(*words, folder=folder)

    def requeue(self, job_id: str) -> bool:
        return self._back_into_queue("requeue", job_id)

    def requeuehold(self, job_id: str) -> bool:
        return self._back_into_queue("requeuehold", job_id)

    def hold(self, job_id: str) -> None:
        self._scontrol("hold", job_id)

    def release(self, job_id: str) -> None:
        self._scontrol("release", job_id)

    def cancel(self, job_id: str) -> None:
        try:
            self._run("scancel", job_id)
        except NoSuchJob:
            return

    def submit(self, script: str, options: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> str:
        answer = self._run("sbatch", "--parsable", *options, script, environment=environment)
        job_id = answer.out.strip().splitlines()[-1].partition(";")[0] if answer.out.strip() else ""
        if not job_id.isdigit():
            raise SlurmError("sbatch took the script but gave no job id that we understand", evidence=answer.evidence)
        return job_id

    def _back_into_queue(self, verb: str, job_id: str) -> bool:
        answer = self._run("scontrol", verb, job_id, check=False)
        if answer.code == 0:
            return True
        if "Job is pending execution" in answer.err + answer.out:
            return False
        raise _failed(answer, f"Slurm did not {verb} job {job_id}")

    def _scontrol(self, *words: str, tolerate: str = "", folder: str | None = None) -> child.Finished:
        answer = self._run("scontrol", *words, check=False, folder=folder)
        if answer.code == 0 or (tolerate and tolerate in answer.err + answer.out):
            return answer
        raise _failed(answer, f"Slurm refused `scontrol {' '.join(words)}`")

    def _run(
        self, *argv: str, environment: Mapping[str, str] | None = None, check: bool = True, folder: str | None = None
    ) -> child.Finished:
        answer = child.run(argv, timeout_s=self.timeout_s, environment=environment, folder=folder)
        if check and answer.code != 0:
            raise _failed(answer, f"`{argv[0]}` failed")
        return answer


def _failed(answer: child.Finished, what: str) -> SlurmError:
    return classify(answer.err + answer.out)(what, evidence=answer.evidence)
