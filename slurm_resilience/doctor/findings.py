"""What is dangerous here for a resilient job, how we know, and what to do about it: one rule, one question."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from slurm_resilience.doctor import preemption
from slurm_resilience.doctor.site import Site, number
from slurm_resilience.errors import ExitCode

_MARGIN_S = 4
# Without a measured one: what a save of a small model takes.  A larger one is told by --save-seconds or a run's own record.
_UNKNOWN_SAVE_S = 5.0
# MaxBatchRequeue is 5 as shipped.
_FEW_REQUEUES = 3


@dataclass(frozen=True)
class Finding:
    """``level``: danger (work is lost, or the job does not come back), warning (slower, or harder to tell), note."""

    name: str
    level: str
    what: str
    evidence: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Rule = Callable[[Site, float | None], Iterator[Finding]]


def of_site(site: Site, *, save_s: float | None = None) -> list[Finding]:
    """All findings about a cluster, the worst first.  ``save_s``: how long a checkpoint takes; None: nobody knows."""
    found = [finding for rule in RULES for finding in rule(site, save_s)]
    order = ("danger", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.level))


def _preempt_mode(site: Site, save_s: float | None) -> Iterator[Finding]:
    for way in preemption.of(site):
        if way.mode == "CANCEL":
            yield Finding(
                "preempt-cancel",
                "danger",
                "Slurm cancels a preempted job here: the run comes back only if it requeues itself before the kill",
                f"PreemptMode=CANCEL by {way.decided_by}",
                "ask for PreemptMode=REQUEUE; a job that did not come back: submit again with the same run folder, the run "
                "goes on where it was",
            )
        elif way.mode in ("SUSPEND", "GANG"):
            yield Finding(
                "preempt-suspend",
                "danger",
                "A preempted job is stopped in memory here: it neither saves nor ends, and its lease on the nodes runs out",
                f"PreemptMode={way.mode} by {way.decided_by}",
                "ask for PreemptMode=REQUEUE for partitions that train",
            )


def _save_fits(site: Site, save_s: float | None) -> Iterator[Finding]:
    kill_wait = site.seconds("KillWait")
    if kill_wait is None:
        return
    needed = _MARGIN_S + (_UNKNOWN_SAVE_S if save_s is None else 1.5 * save_s)
    for way in preemption.of(site):
        if way.mode in ("REQUEUE", "CANCEL") and way.grace_s + kill_wait < needed:
            measured = f"a save takes {save_s:.0f} s" if save_s is not None else "not even a small model saves in that time"
            yield Finding(
                "save-does-not-fit",
                "danger",
                f"From the warning of a preemption to the kill there are {way.grace_s + kill_wait} s: too few to save",
                f"GraceTime={way.grace_s} by {way.decided_by}, KillWait={kill_wait}; {measured}",
                "save more often, in the background; ask for a GraceTime, or a longer KillWait",
            )


def _slurmd_timeout(site: Site, save_s: float | None) -> Iterator[Finding]:
    timeout = site.seconds("SlurmdTimeout")
    if timeout == 0:
        yield Finding(
            "slurmd-timeout",
            "danger",
            "Slurm never gives a dead node up: a job that waits for one waits for ever",
            "SlurmdTimeout=0",
            "ask for SlurmdTimeout=300 (the default)",
        )
    elif timeout is not None and timeout > 900:
        yield Finding(
            "slurmd-timeout",
            "warning",
            "A job with a dead node stays COMPLETING for long when it cannot leave that node out",
            f"SlurmdTimeout={timeout}",
            "ask for SlurmdTimeout=300 (the default); training itself goes on within seconds either way",
        )


def _job_requeue(site: Site, save_s: float | None) -> Iterator[Finding]:
    if site.config.get("JobRequeue") == "0":
        yield Finding(
            "job-requeue",
            "warning",
            "A job may be requeued here only when its script says so",
            "JobRequeue=0",
            "keep `#SBATCH --requeue` in the script (ours have it)",
        )


def _requeue_exit(site: Site, save_s: float | None) -> Iterator[Finding]:
    ours = {int(code): code.name for code in ExitCode if code not in (ExitCode.OK, ExitCode.REQUEUED)}
    for name in ("RequeueExit", "RequeueExitHold"):
        clash = sorted(_codes(site.config.get(name, "")) & ours.keys())
        if clash:
            held = "held" if name == "RequeueExitHold" else "started again, by Slurm and without end"
            yield Finding(
                name.lower(),
                "danger",
                f"A run that has ended for good is {held}",
                f"{name} lists {', '.join(f'{code} ({ours[code]})' for code in clash)}",
                f"ask for {name} without these codes (docs/reference/exit-codes.md lists what they mean)",
            )


def _codes(text: str) -> set[int]:
    """The numbers in ``1,80-85``."""
    out: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        out |= set(range(int(low), int(high or low) + 1))
    return out


def _max_requeues(site: Site, save_s: float | None) -> Iterator[Finding]:
    """Launches that Slurm itself requeues; preemption and requeues by hand or by us are not counted.

    It matters most where a failed prolog does not hold the job at once.  Source: slurm.conf(5) of 23.11, MaxBatchRequeue.
    """
    most = number(site.config.get("MaxBatchRequeue"))
    bounds = "nohold_on_prolog_fail" in site.parameters("SchedulerParameters")
    if most is not None and (most < _FEW_REQUEUES or bounds):
        few = most < _FEW_REQUEUES
        yield Finding(
            "max-batch-requeue",
            "warning" if few else "note",
            f"Once {most} launch{'es' if most != 1 else ''} of a job failed (a prolog, a node that rebooted under its batch "
            "script), Slurm holds it until somebody releases it; preemptions and requeues by hand or by us do not count",
            f"MaxBatchRequeue={most}; the job waits with Reason=JobHoldMaxRequeue then",
            "run `slurm-resilience watch` on a login node, which releases it three times; `sinfo -R` names the nodes"
            + ("; or ask for the default of 5" if few else ""),
        )


def _accounting(site: Site, save_s: float | None) -> Iterator[Finding]:
    if not site.accounting:
        yield Finding(
            "accounting",
            "warning",
            "Nobody remembers a job once Slurm has forgotten it: its last state is known from the run folder alone",
            f"AccountingStorageType={site.config.get('AccountingStorageType') or 'none'}, or slurmdbd does not answer",
            "keep run folders; `slurm-resilience status RUN_DIR` works without accounting",
        )


def _memory_of_jobs(site: Site, save_s: float | None) -> Iterator[Finding]:
    age = site.seconds("MinJobAge")
    if age is not None and age < 60:
        yield Finding(
            "min-job-age",
            "warning",
            "Slurm forgets an ended job so soon that nobody can ask why it ended",
            f"MinJobAge={age}",
            "ask for MinJobAge=300 (the default)",
        )


def _process_tracking(site: Site, save_s: float | None) -> Iterator[Finding]:
    kind = site.config.get("ProctrackType", "").removeprefix("proctrack/")
    if kind in ("pgid", "linuxproc"):
        yield Finding(
            "proctrack",
            "warning" if kind == "pgid" else "note",
            "Slurm loses sight of processes that change their process group: they may outlive the job and hold GPUs",
            f"ProctrackType=proctrack/{kind}",
            "ask for proctrack/cgroup; our agents kill whole process trees either way",
        )


def _prolog_hold(site: Site, save_s: float | None) -> Iterator[Finding]:
    if site.config.get("Prolog") and "nohold_on_prolog_fail" not in site.parameters("SchedulerParameters"):
        yield Finding(
            "prolog-hold",
            "note",
            "A job whose prolog fails is held until somebody releases it",
            "Prolog is set, and SchedulerParameters has no nohold_on_prolog_fail",
            "run `slurm-resilience watch` on a login node, or ask for nohold_on_prolog_fail",
        )


def _scheduler_pace(site: Site, save_s: float | None) -> Iterator[Finding]:
    interval = number(site.parameters("SchedulerParameters").get("bf_interval"))
    if interval is not None and interval > 120:
        yield Finding(
            "scheduler-pace",
            "warning",
            "A requeued job may wait for minutes before Slurm looks at it",
            f"bf_interval={interval}",
            "run `slurm-resilience watch` on a login node, or ask for the EpilogSlurmctld hook",
        )


def _partition_state(site: Site, save_s: float | None) -> Iterator[Finding]:
    state = site.here.get("State", "UP")
    if state != "UP":
        yield Finding(
            "partition-state",
            "danger",
            f"The partition {site.partition} starts no jobs now: a requeued one would wait",
            f"State={state}",
            "choose another partition with --partition, or wait until it is UP",
        )


def _clock(site: Site, save_s: float | None) -> Iterator[Finding]:
    if site.skew_s is not None and abs(site.skew_s) > 3.0:
        yield Finding(
            "clock-skew",
            "danger" if abs(site.skew_s) > 30 else "warning",
            "Deadlines that Slurm gives in its time would be missed in ours",
            f"this machine's clock is {abs(site.skew_s):.0f} s {'ahead of' if site.skew_s > 0 else 'behind'} the controller's",
            "ask for time synchronisation (chrony) on all machines",
        )


def _commands(site: Site, save_s: float | None) -> Iterator[Finding]:
    if site.missing:
        yield Finding(
            "missing-commands",
            "danger" if {"sbatch", "srun"} & set(site.missing) else "warning",
            "Not all of Slurm's commands are here",
            f"not found on PATH: {', '.join(site.missing)}",
            "load the site's slurm module; the supervisor needs scontrol and srun where the batch script runs",
        )


RULES: tuple[Rule, ...] = (
    _preempt_mode,
    _save_fits,
    _slurmd_timeout,
    _job_requeue,
    _requeue_exit,
    _max_requeues,
    _accounting,
    _memory_of_jobs,
    _process_tracking,
    _prolog_hold,
    _scheduler_pace,
    _partition_state,
    _clock,
    _commands,
)
