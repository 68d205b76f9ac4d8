"""Which job in the queue will not start by itself, or not soon, and what helps?  One look, one remedy.

    slow              Slurm keeps a requeued job back for two minutes (BeginTime)      StartTime=now, ≥ 1.2 s later
    orphan            held by a requeue of ours whose process died in between          release
    launch_failed     a prolog failed, so Slurm requeued the job and holds it          release, a bounded number of times
    bad_constraints   no nodes fit any more; with our exclusions less than ever        drop ours, or explain
    held              by an admin: not ours to release                                 explain

Used by whoever looks next: ``watch``, ``submit``, a job object that waits.  Holds of the user's own are never touched.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import ExitCode, SlurmError
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.failures import NoSuchJob, NotPermitted
from slurm_resilience.slurm.mark import Marks
from slurm_resilience.slurm.nodeset import expand, fold
from slurm_resilience.slurm.records import JobRecord
from slurm_resilience.slurm.states import JobState

# A hold with our mark that is younger may still be in work.
ORPHAN_S = 30.0
# Slurm's own delay is cred_expire + 1 (121 s as shipped); a begin time further away is somebody's wish.
SLOW_S = 600.0
# So often a job is let go again after launches that failed, before somebody has to look at the nodes.
MOST_FREED = 3


class Trouble(str, enum.Enum):
    """Why a job in the queue needs somebody."""

    NONE = "none"
    SLOW = "slow"
    ORPHAN = "orphan"
    LAUNCH_FAILED = "launch_failed"
    BAD_CONSTRAINTS = "bad_constraints"
    HELD = "held"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Help:
    """What was done about a job, or why nothing was.  ``helped``: it can start now."""

    job_id: str
    trouble: Trouble
    helped: bool
    said: str


def trouble(record: JobRecord, *, now: float) -> Trouble:
    """What the controller's record shows.  Pure."""
    if not record.state.waiting:
        return Trouble.NONE
    marks, reason = Marks.read(record.comment), record.reason.lower().replace(" ", "_")
    if reason.startswith("badconstraints"):
        return Trouble.BAD_CONSTRAINTS
    if record.held:
        if marks.held_at is not None:
            return Trouble.ORPHAN if now - marks.held_at >= ORPHAN_S else Trouble.NONE
        if reason.startswith(("launch_fail", "jobholdmaxrequeue")):
            return Trouble.LAUNCH_FAILED
        if reason == "jobheldadmin":
            # After a failed prolog some releases name the admin as the one who holds it; trying is harmless.
            return Trouble.LAUNCH_FAILED if record.restarts > 0 and marks.freed < MOST_FREED else Trouble.HELD
        return Trouble.NONE
    if reason == "begintime" and record.restarts > 0 and record.eligible_at is not None:
        # One that has passed counts, too: nothing wakes the scheduler when a begin time comes.
        return Trouble.SLOW if record.eligible_at - now <= SLOW_S else Trouble.NONE
    return Trouble.NONE


def help_job(client: SlurmClient, record: JobRecord, *, clock: Clock = SYSTEM_CLOCK) -> Help:
    """Do what helps this job, if anything does.  Raises :class:`SlurmError` when Slurm does not let us or does not answer.

    A slow one is the caller's to time: see :class:`slurm_resilience.slurm.watch.Watch`.
    """
    kind, marks = trouble(record, now=clock.time()), Marks.read(record.comment)
    if kind is Trouble.ORPHAN:
        _release(client, record, marks.let_go())
        return Help(record.job_id, kind, True, f"a requeue had left it held ({marks.holder}): released")
    if kind is Trouble.LAUNCH_FAILED:
        return _after_failed_launch(client, record, marks)
    if kind is Trouble.BAD_CONSTRAINTS:
        return _unconstrain(client, record, marks)
    if kind is Trouble.HELD:
        return Help(record.job_id, kind, False, f"an admin holds it (Reason={record.reason}): ask them, it cannot be released")
    return Help(record.job_id, kind, False, "")


def forgotten(record: JobRecord) -> bool:
    """The job had requeued itself, and Slurm has forgotten that: a slurmctld that dies loses what it has not yet saved.

    Only a supervisor that has put its job back into the queue ends with that code.  Seen on 22.05.8, killed in mid-requeue.
    """
    return record.state is JobState.FAILED and record.exit_code == ExitCode.REQUEUED and Marks.read(record.comment).ours


def revive(client: SlurmClient, record: JobRecord) -> None:
    """Put a :func:`forgotten` job back; Slurm keeps one that is over for MinJobAge.  Raises :class:`SlurmError`."""
    client.requeue(record.job_id)


def sweep(client: SlurmClient, user: str, *, clock: Clock = SYSTEM_CLOCK) -> list[Help]:
    """Help all of that user's jobs that ask for it; what was done, and what was found that nobody can help."""
    out = []
    for record in client.pending(user):
        if not Marks.read(record.comment).ours:
            continue
        try:
            done = help_job(client, record, clock=clock)
        except NoSuchJob:  # it went while we looked
            continue
        except SlurmError as error:
            done = Help(record.job_id, trouble(record, now=clock.time()), False, str(error))
        if done.said:
            out.append(done)
    return out


def _release(client: SlurmClient, record: JobRecord, marks: Marks) -> None:
    # The mark goes last: until then the next one who looks would do it again.
    client.update(record.job_id, StartTime="now+2")
    client.release(record.job_id)
    client.update(record.job_id, Comment=str(marks))


def _after_failed_launch(client: SlurmClient, record: JobRecord, marks: Marks) -> Help:
    why = f"Reason={record.reason}: a prolog failed or a node could not launch it"
    if marks.freed >= MOST_FREED:
        said = (
            f"{why}, {marks.freed} times after it was released: it stays held. See `sinfo -R` for the nodes, have them "
            f"repaired, then `scontrol release {record.job_id}`"
        )
        return Help(record.job_id, Trouble.LAUNCH_FAILED, False, said)
    again = Marks(marks.words, excluded=marks.excluded, excluded_at=marks.excluded_at, freed=marks.freed + 1)
    client.update(record.job_id, Comment=str(again))  # counted before it is done: a bound that can be missed is none
    try:
        client.update(record.job_id, StartTime="now+2")
        client.release(record.job_id)
    except NotPermitted as error:
        said = f"{why}; Slurm does not let us release it ({error.evidence}): ask an admin"
        return Help(record.job_id, Trouble.LAUNCH_FAILED, False, said)
    return Help(record.job_id, Trouble.LAUNCH_FAILED, True, f"{why}: released, {again.freed} of {MOST_FREED} times")


def _unconstrain(client: SlurmClient, record: JobRecord, marks: Marks) -> Help:
    if marks.excluded:
        theirs = [name for name in record.excluded if name not in marks.excluded]
        client.update(record.job_id, ExcNodeList=fold(theirs))
        _release(client, record, Marks(marks.words, freed=marks.freed))
        said = f"too few nodes are left without {fold(marks.excluded)}, which we had excluded: allowed again"
        return Help(record.job_id, Trouble.BAD_CONSTRAINTS, True, said)
    members = expand(client.partition(record.partition).get("Nodes", ""))
    usable = [name for name, node in client.nodes(members).items() if node.usable and name not in record.excluded]
    said = (
        f"no nodes fit: it asks for {record.num_nodes[0]} of partition {record.partition}, where {len(usable)} of "
        f"{len(members)} can be used" + (f" without {fold(record.excluded)}" if record.excluded else "")
        + f". `scontrol update JobId={record.job_id} NumNodes=…` or `ExcNodeList=` changes it"
    )  # fmt: skip
    return Help(record.job_id, Trouble.BAD_CONSTRAINTS, False, said)
