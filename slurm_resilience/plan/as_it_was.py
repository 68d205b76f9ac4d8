"""A run's own failures with its own costs: does the model, fed with what the run showed, give what was measured?

What is taken from the run: when things failed and what work each failure took away; the means of what a save, a detection, a
relaunch, a requeue and its queue cost.  What it never showed is assumed as for any other run, and named.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_resilience.observe.accounts import Measured
from slurm_resilience.observe.failures import Failure, Trace
from slurm_resilience.observe.ledger import Ledger
from slurm_resilience.plan.replay import OUR_DETECT_S, OUR_QUEUE_S

RELAUNCH_S, START_S = 60.0, 300.0


@dataclass(frozen=True)
class AsItWas:
    """The replayed ledger; ``assumed``: what the run did not show although it was needed, in seconds, by name."""

    ledger: Ledger
    assumed: dict[str, float]


def as_it_was(trace: Trace, measured: Measured) -> AsItWas:
    """Replay a run by its own figures.  Every second is in one account."""
    run = _Replay(trace.length_s, measured)
    meant = [*trace.moves, *([trace.ending] if trace.ending is not None else [])]
    for stop, failed in sorted(
        [(one, True) for one in trace.failures] + [(one, False) for one in meant], key=lambda it: it[0].at_s
    ):
        run.stop(stop, failed=failed)
    return run.end(failures=len(trace.failures))


class _Replay:
    """Trains from ``_up`` to the next stop; None: it never trains again."""

    def __init__(self, length_s: float, measured: Measured) -> None:
        self._length_s, self._measured = length_s, measured
        self._assumed: dict[str, float] = {}
        self._spent = dict.fromkeys(("productive_s", "saving_s", "lost_s", "restart_s", "queued_s"), 0.0)
        self._requeues = 0
        first = measured.first_start_s if measured.first_start_s is not None else length_s  # it never came to train
        self._up: float | None = self._spend(0.0, min(first, length_s), "restart_s")

    def stop(self, stop: Failure, *, failed: bool) -> None:
        """Train until then; then detect, perhaps queue, and start again."""
        if self._up is None:
            return
        at = max(self._up, min(stop.at_s, self._length_s))
        self._train(at, stop.lost_s or 0.0)
        if stop.requeued:
            self._requeues += 1
            at = self._spend(at, at + self._take("leave_s", 0.0), "restart_s")
            if not stop.back:
                self._spend(at, self._length_s, "queued_s")
                self._up = None
                return
            at = self._spend(at, at + self._take("queue_s", OUR_QUEUE_S), "queued_s")
            self._up = self._spend(at, at + self._take("start_s", START_S), "restart_s")
        elif not stop.back:
            self._spend(at, self._length_s, "restart_s")
            self._up = None
        elif failed:
            detect_s = self._measured.detect_s.get(stop.cause)
            if detect_s is None:
                detect_s = self._assumed.setdefault(f"detect_s:{stop.cause}", OUR_DETECT_S.get(stop.cause, 0.0))
            self._up = self._spend(at, at + detect_s + self._take("relaunch_s", RELAUNCH_S), "restart_s")
        else:
            self._up = self._spend(at, at + self._take("move_s", RELAUNCH_S), "restart_s")

    def end(self, *, failures: int) -> AsItWas:
        """The ledger at the end of the trace."""
        if self._up is not None:
            ended_at = max(self._up, self._length_s - (self._measured.end_s or 0.0))
            self._train(ended_at, 0.0)
            self._spend(ended_at, self._length_s, "restart_s")
        ledger = Ledger(self._length_s, **self._spent, failures=failures, requeues=self._requeues)
        return AsItWas(ledger, self._assumed)

    def _train(self, until: float, lost_s: float) -> None:
        """Train and save up to then; ``lost_s`` of it, or of what was trained before, was in vain."""
        assert self._up is not None
        trained = max(0.0, until - self._up)
        per_save_s, save_s = self._measured.per_save_s, self._measured.save_s or 0.0
        saving = trained * save_s / (per_save_s + save_s) if per_save_s else 0.0
        self._spent["saving_s"] += saving
        self._spent["productive_s"] += trained - saving - lost_s
        self._spent["lost_s"] += lost_s

    def _take(self, name: str, otherwise: float) -> float:
        seen = getattr(self._measured, name)
        return float(seen) if seen is not None else self._assumed.setdefault(name, otherwise)

    def _spend(self, since: float, until: float, account: str) -> float:
        until = max(since, min(until, self._length_s))
        self._spent[account] += until - since
        return until
