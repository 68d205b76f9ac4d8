"""What happens next, and why: pure functions from (history, situation) to a decision with its reason as a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from slurm_resilience.config import BudgetConfig, ResilienceConfig
from slurm_resilience.errors import EXIT_CODE_OF, Cause, ExitCode
from slurm_resilience.observe.failures import MOVED_BY_HAND
from slurm_resilience.runtime.history import History

Action = Literal["launch", "wait", "requeue", "stop"]

# A supervisor that dies this often without progress in between is itself the fault.
MAX_SUPERVISOR_RESTARTS = 10
# A node that has fallen silent may come back: a switch restarts, a cable is put back.  Waited for only when too few are left.
RETURN_S = 30.0
_BACK_OFF_S = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
_SAME_EXCEPTION = 2
# A job whose time is over before there is a new checkpoint would come back for ever: its limit is the same each time.
_VAIN_LIMITS = 3


@dataclass(frozen=True)
class Situation:
    """What the coordinator sees while nothing runs.

    ``fault``: the cause that ended the last attempt, None at the start of an allocation.  ``ready`` nodes could run ranks
    now, in order of preference; ``coming`` ones are starting or warming up and still within their time; ``returning``
    ones are lost and may come back.  ``idle_s``: since nothing runs.  ``suspects``: node → reason; they are used only where
    the fewest need them.  ``before``: nodes of the last attempt.
    """

    fault: Cause | None
    detail: str
    ready: tuple[str, ...]
    coming: tuple[str, ...] = ()
    returning: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    idle_s: float = 0.0
    can_requeue: bool = True
    suspects: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What to do.  ``reason`` is a sentence for people; ``cause`` is why the run ends or moves, where it does.

    ``nodes`` are all that could take part in a launch; the planner chooses among them.  ``by_hand``: see
    :class:`~slurm_resilience.slurm.cause.Verdict`.
    """

    action: Action
    reason: str
    nodes: tuple[str, ...] = ()
    cause: Cause = Cause.UNKNOWN
    exit_code: ExitCode = ExitCode.OK
    by_hand: str = ""

    def because(self, evidence: str) -> Decision:
        """The same decision with more evidence in its reason."""
        return replace(self, reason=f"{self.reason} ({evidence})") if evidence else self


def budget_of(cause: Cause, budgets: BudgetConfig) -> int | None:
    """How often a cause may strike without progress; None where it is free."""
    if cause in (Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.CANCELLED, Cause.NODE_DRAINED):
        return None
    if cause in (Cause.CONFIG_ERROR, Cause.APP_ERROR):
        return 0
    if cause is Cause.UNKNOWN:
        # Agents that heard nothing for a while, or a supervisor that stood still: what a cut that lasts longer is, too.
        return budgets.node_lost
    return int(getattr(budgets, cause.value, budgets.rank_crash))


def decide(history: History, now: Situation, config: ResilienceConfig) -> Decision:
    """Launch, wait, requeue or stop, after a fault or at the start of an allocation."""
    return _give_up(history, now, config) or _back_off(history, now) or _with_whom(now, config)


def decide_warned(
    cause: Cause,
    detail: str,
    *,
    already_requeued: bool,
    can_requeue: bool,
    by_hand: str = "",
    by_script: bool = False,
    vain_limits: int = 0,
) -> Decision:
    """Requeue or stop, after everything has saved and ended on a warning.

    A cancelled job is never requeued, and neither is one whose cause nobody could tell: the recipe would bring a cancelled
    job back to life.  ``by_script``: that is the batch script's to find out, which can ask.  ``vain_limits``: see
    :class:`History`.  ``by_hand``: who or what has put the job back into the queue, where somebody did.
    Source: facts measured on Slurm 22.05, ``requeuehold`` answers 0 for a job in mid-cancel.
    """
    code = EXIT_CODE_OF[cause]
    word = MOVED_BY_HAND if by_hand else str(cause).replace("_", " ")
    why = f"{word} ({detail})" if detail else word
    if already_requeued:
        reason = f"{why}: Slurm has requeued the job already, the run goes on in its next allocation"
        return Decision("requeue", reason, (), cause, code, by_hand)
    if cause is Cause.TIME_LIMIT and vain_limits >= _VAIN_LIMITS:
        reason = (
            f"{why}: {vain_limits} allocations in a row have brought no new checkpoint, and the next would end the same way: "
            "give the job more time (--time), or have it warned later (--signal-delay-s)"
        )
        return Decision("stop", reason, (), cause, code)
    if cause in (Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.NODE_LOST, Cause.NODE_DRAINED):
        if can_requeue:
            return Decision("requeue", f"{why}: the run goes on in a new allocation", (), cause, code)
        return Decision("stop", f"{why}: requeueing is off or not possible here", (), cause, code)
    if cause is Cause.UNKNOWN and not by_hand and by_script and can_requeue:
        reason = f"{why}: the batch script asks Slurm, and puts the job back unless it was cancelled"
        return Decision("requeue", reason, (), cause, code)
    return Decision("stop", f"{why}: the run ends here", (), cause, code, by_hand)


def decide_misfit(why: str, fault: Cause | None, *, lost: bool, can_requeue: bool) -> Decision:
    """What to do when batch or mesh do not fit on the nodes that are ready.

    Where nodes were ``lost`` it is the allocation that has become too small, and another one may do; else it is a mistake in
    the configuration, which no other allocation mends.
    """
    if not lost:
        return Decision("stop", why, (), Cause.CONFIG_ERROR, ExitCode.CONFIG_ERROR)
    cause = fault if fault in (Cause.NODE_LOST, Cause.NODE_DRAINED) else Cause.NODE_LOST
    if can_requeue:
        return Decision(
            "requeue", f"what is left is too little: a new allocation is asked for ({why})", (), cause, EXIT_CODE_OF[cause]
        )
    return Decision(
        "stop", f"what is left is too little, and the job cannot be requeued ({why})", (), cause, EXIT_CODE_OF[cause]
    )


def _give_up(history: History, now: Situation, config: ResilienceConfig) -> Decision | None:
    if history.supervisor_restarts > MAX_SUPERVISOR_RESTARTS:
        reason = f"the supervisor was restarted {history.supervisor_restarts} times without a new checkpoint in between"
        return Decision("stop", reason, (), Cause.UNKNOWN, ExitCode.INTERNAL)
    if now.fault is None:
        return None
    same = history.same_signature()
    if same >= _SAME_EXCEPTION:
        often = "twice" if same == _SAME_EXCEPTION else f"{same} times"
        reason = (
            f"the same exception at the same step {often}, nothing gained in between: your code, not the cluster ({now.detail})"
        )
        return Decision("stop", reason, (), Cause.APP_ERROR, ExitCode.APP_ERROR)
    budget = budget_of(now.fault, config.budgets)
    used = history.count(now.fault)
    if now.fault is Cause.BAD_CHECKPOINT and history.goes_back:
        budget = max(budget or 0, config.verify.most_rollbacks)
    if budget == 0 and now.fault in (Cause.CONFIG_ERROR, Cause.APP_ERROR, Cause.BAD_CHECKPOINT):
        reason = f"{now.detail}: trying again would end the same way"
        return Decision("stop", reason, (), now.fault, EXIT_CODE_OF[now.fault])
    if budget is not None and used > budget:
        since = f"since the checkpoint at step {history.best_step}" if history.best_step >= 0 else "without a single checkpoint"
        times = "once" if used == 1 else f"{used} times"
        reason = f"{now.fault} {times} {since}, more than its budget of {budget} allows ({now.detail})"
        if history.best_step < 0:
            reason += "; only a new checkpoint refills it: where the script keeps its own file, give --checkpoint-file"
        return Decision("stop", reason, (), now.fault, EXIT_CODE_OF[now.fault])
    return None


def _back_off(history: History, now: Situation) -> Decision | None:
    if now.fault in (None, Cause.NODE_LOST, Cause.NODE_DRAINED):
        return None
    faults = sum(fault.cause != Cause.NODE_LOST for fault in history.faults)
    pause = _BACK_OFF_S[min(faults, len(_BACK_OFF_S) - 1)]
    if now.idle_s >= pause:
        return None
    return Decision("wait", f"{faults} faults without progress: a pause of {pause:g} s before the next launch")


def _with_whom(now: Situation, config: ResilienceConfig) -> Decision:
    fewest, most = config.nodes
    clean = [name for name in now.ready if name not in now.suspects]
    if len(clean) >= most:
        return Decision("launch", _counted(now, most, fewest), now.ready)
    if now.coming:
        return Decision("wait", f"{len(now.ready)} of {most} nodes are ready; waiting for {', '.join(now.coming)}")
    if len(now.ready) >= fewest:
        return Decision("launch", _counted(now, min(most, max(len(clean), fewest)), fewest), now.ready)
    short = f"{len(now.ready)} nodes are ready and at least {fewest} are needed"
    if now.returning and now.idle_s < RETURN_S:
        return Decision("wait", f"{short}; {', '.join(now.returning)} may come back")
    cause = now.fault if now.fault in (Cause.NODE_LOST, Cause.NODE_DRAINED) else Cause.LAUNCH_FAILED
    if now.fault is None and now.lost:
        cause = Cause.NODE_LOST
    if now.can_requeue:
        return Decision("requeue", f"{short}: a new allocation is asked for", (), cause, EXIT_CODE_OF[cause])
    return Decision("stop", f"{short}, and the job cannot be requeued", (), cause, EXIT_CODE_OF[cause])


def _counted(now: Situation, count: int, fewest: int) -> str:
    ranked = sorted(now.ready, key=lambda name: name in now.suspects)
    chosen, others = ranked[:count], ranked[count:]
    here, then = set(chosen), set(now.before)
    out = f"{count} node{'s' if count != 1 else ''} (at least {fewest})"
    out += f", without {', '.join(now.lost)}" if now.lost else ""
    left = [name for name in now.before if name not in here]
    new = [name for name in chosen if name not in then]
    if left and new:
        out += f"; {', '.join(new)} in place of {', '.join(left)}"
    suspected = [name for name in others if name in now.suspects]
    out += "".join(f"; {name} is left out: {now.suspects[name]}" for name in suspected)
    used = [name for name in chosen if name in now.suspects]
    out += "".join(f"; {name} is needed though {now.suspects[name]}" for name in used)
    spare = len(others) - len(suspected)
    return f"{out}; {spare} spare" if spare else out
