"""The same failures under another policy: what would have been lost?

A failure strikes at its time on the clock, whatever the job does then: in training it costs the work since the last save; in
a restart it starts the restart again; in the queue it hits somebody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_resilience.errors import Cause, ConfigError
from slurm_resilience.observe.failures import SUPERVISOR_LOST, Failure, Trace
from slurm_resilience.observe.ledger import Ledger

_WARNED = frozenset({Cause.PREEMPTION.value, Cause.TIME_LIMIT.value, Cause.NODE_DRAINED.value})
_INSIDE = frozenset(
    cause.value for cause in (Cause.NODE_LOST, Cause.RANK_CRASH, Cause.HANG, Cause.OOM, Cause.LAUNCH_FAILED, Cause.UNKNOWN)
) | {SUPERVISOR_LOST}
_NODE_GONE = frozenset({Cause.NODE_LOST.value})


@dataclass(frozen=True)
class Policy:
    """What is done about a failure, in seconds.

    ``detect_s`` by cause (0 where not named).  Causes in ``inside`` are recovered in the allocation in ``relaunch_s``; others
    cost the queue and ``start_s``.  ``saves_on_warning``: an announced end loses no work.  A lost node is replaced from
    ``spares``; after them the job goes on with fewer nodes (down to ``min_nodes``, below that it is requeued) until a
    restart that comes after ``repair_s`` has it back.  ``first_start_s``: the very first start, where that differs from later
    ones; ``end_s``: from the end of the work to the end of the run.
    """

    interval_s: float
    save_s: float
    start_s: float
    queue_s: float
    relaunch_s: float = 0.0
    detect_s: Mapping[str, float] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()
    saves_on_warning: bool = False
    spares: int = 0
    repair_s: float = 86_400.0
    min_nodes: int = 1
    first_start_s: float | None = None
    end_s: float = 0.0

    def __post_init__(self) -> None:
        times = {name: getattr(self, name) for name in ("save_s", "start_s", "queue_s", "relaunch_s", "repair_s", "end_s")}
        if self.interval_s <= 0 or any(value < 0 for value in [*times.values(), *self.detect_s.values()]):
            raise ConfigError(
                "A policy with negative times, or without any time between saves, makes no sense",
                evidence=f"interval {self.interval_s} s, {times}, detection {dict(self.detect_s)}",
            )


# Stock Slurm, measured on 22.05.8 with its defaults (n in parentheses): a dead node is noticed after 412.7 s (1); a hang by
# NCCL's own time-out, 600 s; the queue takes 127.6 s (12) from requeue to running on an idle cluster.
STOCK_DETECT_S = {Cause.NODE_LOST.value: 412.7, Cause.HANG.value: 600.0}
STOCK_QUEUE_S = 127.6
# Ours: the promises that tests and benchmarks hold (a dead rank within 1 s, a dead node within 5 s, alone from requeue to
# running within 40 s); a hang by its calibrated limit.
OUR_DETECT_S = {Cause.RANK_CRASH.value: 1.0, Cause.NODE_LOST.value: 5.0, Cause.HANG.value: 60.0}
OUR_QUEUE_S = 40.0


def stock(*, interval_s: float, save_s: float, start_s: float, queue_s: float = STOCK_QUEUE_S) -> Policy:
    """A job that Slurm requeues at every failure."""
    return Policy(interval_s, save_s, start_s, queue_s, detect_s=STOCK_DETECT_S)


def ours(
    *,
    interval_s: float,
    save_s: float,
    start_s: float,
    relaunch_s: float,
    queue_s: float = OUR_QUEUE_S,
    spares: int = 0,
    repair_s: float = 86_400.0,
    min_nodes: int = 1,
) -> Policy:
    """Recovery inside the allocation first; a requeue only for what ends the allocation, with a save before it."""
    return Policy(interval_s, save_s, start_s, queue_s, relaunch_s, OUR_DETECT_S, _INSIDE, True, spares, repair_s, min_nodes)


def replay(trace: Trace, policy: Policy, *, nodes: int = 1) -> Ledger:
    """The ledger of a job on ``nodes`` nodes that lives through the trace; it starts, cold but without a queue, at 0.

    It ends when the trace does, or when somebody ended it on purpose.
    """
    job = _Job(policy, nodes)
    ended_at = max(0.0, trace.length_s - policy.end_s) if trace.ending is None else trace.ending.at_s
    for failure in trace.failures:
        if failure.at_s <= ended_at:
            job.fail(failure)
    return job.end(ended_at, trace.length_s)


class _Job:
    """Accounts up to ``_now``; then queue until ``_granted``, restart until ``_up``, then training."""

    def __init__(self, policy: Policy, nodes: int) -> None:
        self._policy = policy
        self._nodes = nodes
        self._now = self._queue_from = self._granted = 0.0
        self._up = policy.start_s if policy.first_start_s is None else policy.first_start_s
        self._away: list[float] = []  # when each lost node comes back
        self._spares = policy.spares
        self._spent = dict.fromkeys(("productive_s", "saving_s", "lost_s", "restart_s", "queued_s", "reduced_s"), 0.0)
        self._failures = self._requeues = 0
        self._capacity = 1.0

    def fail(self, failure: Failure) -> None:
        """Live until the failure, then decide what happens next."""
        at = failure.at_s
        if at < self._granted:
            return  # in the queue: not our nodes
        policy = self._policy
        keeps = policy.saves_on_warning and failure.cause in _WARNED
        self._live(at, lose=not keeps)
        self._failures += 1
        noticed = at + policy.detect_s.get(failure.cause, 0.0)
        self._away = [back for back in self._away if back > at]
        if failure.cause in _NODE_GONE and failure.cause in policy.inside:
            if self._spares:
                self._spares -= 1
            else:
                self._away.append(at + policy.repair_s)
        outside = bool(failure.requeued) and failure.cause == Cause.UNKNOWN.value  # somebody else ended the allocation
        inside = failure.cause in policy.inside and not outside and self._nodes - len(self._away) >= policy.min_nodes
        self._granted = noticed if inside else noticed + policy.queue_s
        self._up = self._granted + (policy.relaunch_s if inside else policy.start_s)
        self._queue_from = noticed
        if not inside:
            self._requeues += 1
            self._away, self._spares = [], policy.spares
        self._capacity = 1 - len(self._away) / self._nodes

    def _live(self, until: float, *, lose: bool) -> None:
        """Account for the time up to ``until``."""
        queue_from, granted, up = (max(self._now, moment) for moment in (self._queue_from, self._granted, self._up))
        spent = self._spent
        spent["restart_s"] += min(queue_from, until) - min(self._now, until)  # noticing
        spent["queued_s"] += min(granted, until) - min(queue_from, until)
        spent["restart_s"] += min(up, until) - min(granted, until)
        trained = until - min(up, until)
        whole = self._policy.interval_s + self._policy.save_s
        count, rest = divmod(trained, whole)
        if not lose:  # saved at the end, as far as the interval had come
            work = min(rest, self._policy.interval_s)
            saving = count * self._policy.save_s + rest - work
            done, lost = count * self._policy.interval_s + work, 0.0
        else:
            done, saving, lost = count * self._policy.interval_s, count * self._policy.save_s, rest
        spent["saving_s"] += saving
        spent["lost_s"] += lost
        spent["productive_s"] += done * self._capacity
        spent["reduced_s"] += done * (1 - self._capacity)
        self._now = until

    def end(self, at: float, over: float) -> Ledger:
        """The ledger at ``over``, the end of the trace, after the work ended ``at``; unsaved work is kept."""
        self._live(at, lose=False)
        self._spent["restart_s"] += over - at
        return Ledger(over, **self._spent, failures=self._failures, requeues=self._requeues)
