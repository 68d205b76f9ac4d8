"""What did a run really spend its time on?  Its own event file, turned into a ledger, a trace and measured parameters.

Training counts from the first completed step of an attempt (less that step's own time) to the fault, as far back as
``since`` says.  What was trained after the step that the next attempt resumed from is lost.  A save counts as standing still
for the seconds that it says, and otherwise unless steps were reported while it was going on.  Where nobody told the end of an
attempt, its last reported step is the end; a supervisor that died is no end by itself, since the ranks may live on.
Which failures there were, and their causes, is what :mod:`slurm_resilience.observe.incidents` says.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_resilience.errors import ConfigError
from slurm_resilience.observe.failures import Trace, word_of
from slurm_resilience.observe.incidents import Incidents
from slurm_resilience.observe.interruptions import Interruption, sorted_out
from slurm_resilience.observe.ledger import Ledger
from slurm_resilience.observe.timeline import DOWN, LOST, QUEUED, SAVING, TRAINING, Span, Timeline


@dataclass(frozen=True)
class Measured:
    """What the run showed, in seconds; None, or absent, where it never happened.

    ``step_s`` and ``interval_s``, between two saves, are medians, all else means, since costs add up.  ``per_save_s``
    training for each save · ``save_s`` standing still for one · ``first_start_s`` from the first allocation to training,
    ``start_s`` from a later one · ``detect_s`` from a fault to its detection, by cause · ``relaunch_s`` from there to training,
    in the same allocation · ``move_s`` the same for a relaunch that was no failure's · ``leave_s`` from the end of training to
    the queue · ``queue_s`` in it · ``end_s`` from the end of the work to the end of the run.
    """

    step_s: float | None = None
    interval_s: float | None = None
    per_save_s: float | None = None
    save_s: float | None = None
    first_start_s: float | None = None
    start_s: float | None = None
    detect_s: Mapping[str, float] = field(default_factory=dict)
    relaunch_s: float | None = None
    move_s: float | None = None
    leave_s: float | None = None
    queue_s: float | None = None
    end_s: float | None = None


@dataclass(frozen=True)
class Account:
    """``complete``: the run has ended.  ``nodes``: the most that an attempt used.  ``spans``: what it did, without gaps."""

    ledger: Ledger
    trace: Trace
    measured: Measured
    nodes: int
    complete: bool
    spans: tuple[Span, ...] = ()


def account(events: Iterable[Mapping[str, Any]]) -> Account:
    """The account of a run from its events.  Raises :class:`ConfigError` when there are none."""
    facts = [event for event in events if isinstance(event.get("t"), (int, float))]
    if not facts:
        raise ConfigError("There are no events to replay", remedy="give the folder of a run, or its events.jsonl")
    reader = _Reader(_step_s(facts))
    for fact in facts:
        reader.take(fact)
    return reader.result(float(facts[0]["t"]), max(float(fact["t"]) for fact in facts))


def _step_s(facts: Sequence[Mapping[str, Any]]) -> float:
    """The median time of a step, by what rank 0 reported within one attempt."""
    seen: dict[Any, tuple[float, int]] = {}
    times = []
    for fact in facts:
        if fact["event"] in ("first_step", "step_reported") and isinstance(fact.get("step"), int):
            at, step = float(fact["t"]), int(fact["step"])
            before = seen.get(fact.get("attempt"))
            if before is not None and step > before[1]:
                times.append((at - before[0]) / (step - before[1]))
            seen[fact.get("attempt")] = (at, step)
    return statistics.median(times) if times else 0.0


class _Reader:
    """Takes one event after the other."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._line = Timeline()
        self._marks: dict[int, float] = {}
        self._saving_step: int | None = None
        self._incidents = Incidents()
        self._stops: list[Interruption] = []
        self._down_now: Interruption | None = None
        self._requeues = self._allocations = 0
        self._nodes = 1
        self._complete = self._failed = False
        self._start = self._last_at = self._launched_at = self._stepped_at = 0.0
        self._attempt, self._ended_attempt = 0, -1
        self._allocated_at: float | None = None
        self._finished_at: float | None = None
        self._queued_at: float | None = None
        self._saved_at: float | None = None
        self._first_start_s: float | None = None
        self._saves: list[float] = []
        self._reported: list[tuple[int, float]] = []  # since the last committed step
        self._intervals: list[float] = []

    def take(self, fact: Mapping[str, Any]) -> None:
        at = float(fact["t"])
        self._incidents.apply(fact)
        if not self._line.spans:
            self._start = at
            self._allocated_at = at
            self._line.begin(at, DOWN)
        handler = getattr(self, f"_on_{fact['event']}", None)
        if handler is not None:
            handler(at, fact)
        self._last_at = max(self._last_at, at)  # what was kept while there was no supervisor is told late

    def _on_allocation_started(self, at: float, fact: Mapping[str, Any]) -> None:
        if self._allocations and self._queued_at is None:  # the last allocation ended without a word
            self._down(self._last_at, "unknown", {})
            self._line.begin(self._last_at, QUEUED)
            self._queued_at = self._last_at
            if self._down_now is not None:
                self._down_now.requeued = True
        if self._queued_at is not None and self._down_now is not None:
            self._down_now.queued_s += at - self._queued_at
        self._allocations += 1
        self._queued_at, self._allocated_at = None, at
        self._complete = self._failed = False  # somebody has taken it up again
        self._line.begin(at, DOWN)

    def _on_attempt_started(self, at: float, fact: Mapping[str, Any]) -> None:
        if self._line.now in (TRAINING, SAVING):  # the last one ended without a word
            self._down(max(self._stepped_at, self._line.spans[-1].start), "unknown", fact)
        self._nodes = max(self._nodes, len(fact.get("nodes") or ()))
        self._attempt, self._launched_at = int(fact.get("attempt") or 0), at

    def _on_resumed(self, at: float, fact: Mapping[str, Any]) -> None:
        step = fact.get("step")
        self._lose(self._passed_at(step) if isinstance(step, int) else self._start, self._launched_at)

    def _lose(self, since: float, until: float) -> None:
        lost = self._line.lose(since, until)
        if self._stops:
            self._stops[-1].lost_s += lost

    def _passed_at(self, step: int) -> float:
        """When ``step`` was complete: its save began then, or, where a copy in memory was enough, rank 0 reported it."""
        if step in self._marks:
            return self._marks[step]
        return max((at for reported, at in self._reported if reported <= step), default=self._start)

    def _on_started_fresh(self, at: float, fact: Mapping[str, Any]) -> None:
        self._lose(self._start, self._launched_at)

    def _on_first_step(self, at: float, fact: Mapping[str, Any]) -> None:
        if self._line.now != DOWN or int(fact.get("attempt") or 0) <= self._ended_attempt:
            return  # the last words of an attempt may arrive after its end
        up = max(self._line.spans[-1].start, at - self._step_s)
        if self._down_now is not None:
            self._down_now.up_at = up
            if self._allocated_at is not None:
                self._down_now.start_s = up - self._allocated_at
        elif self._allocated_at is not None and self._first_start_s is None:
            self._first_start_s = up - self._allocated_at
        self._allocated_at = self._down_now = None
        self._saved_at = up
        self._line.begin(up, TRAINING)

    def _on_step_reported(self, at: float, fact: Mapping[str, Any]) -> None:
        step = fact.get("step")
        self._stepped_at = at
        if isinstance(step, int):
            self._reported.append((step, at))
        self._on_first_step(at, fact)  # rank 0 may report before the last rank has completed its first step
        if self._line.now == SAVING and isinstance(step, int) and self._saving_step is not None and step > self._saving_step:
            self._line.spans[-1].kind = TRAINING  # the save runs behind the steps

    def _on_checkpoint_started(self, at: float, fact: Mapping[str, Any]) -> None:
        step = fact.get("step")
        if isinstance(step, int):
            self._marks[step] = at
            self._saving_step = step
        if self._line.now == TRAINING:
            if self._saved_at is not None:
                self._intervals.append(at - self._saved_at)
            self._line.begin(at, SAVING)

    def _on_checkpoint_committed(self, at: float, fact: Mapping[str, Any]) -> None:
        step, seconds, stall = fact.get("step"), fact.get("seconds"), fact.get("stall_s")
        self._reported = [each for each in self._reported if isinstance(step, int) and each[0] >= step]
        if isinstance(step, int) and step in self._marks and isinstance(stall, (int, float)):
            self._end_of_told_save(at, step, float(stall))
            return
        if isinstance(step, int):  # a script of its own may tell the end of a save only
            self._marks.setdefault(step, at - float(seconds) if isinstance(seconds, (int, float)) else at)
        if self._line.now == TRAINING and isinstance(seconds, (int, float)) and self._saving_step is None:
            self._line.begin(max(at - float(seconds), self._stepped_at), SAVING)
        if self._line.now == SAVING:
            self._saves.append(at - self._line.spans[-1].start)
        elif self._line.now == TRAINING:
            self._saves.append(0.0)
        self._end_of_save(at)

    def _end_of_told_save(self, at: float, step: int, stall_s: float) -> None:
        """A save that says for how long training stood: at its begin.  The rest was written behind the steps."""
        began, over = self._marks[step], min(at, self._marks[step] + stall_s)
        self._saves.append(stall_s)
        if self._saving_step == step:
            if self._line.now == SAVING:
                self._line.begin(over, TRAINING)
            self._saving_step, self._saved_at = None, over
        if self._line.now == TRAINING:
            self._line.begin(at, TRAINING)
        self._line.paint(began, over, SAVING)

    def _on_checkpoint_failed(self, at: float, fact: Mapping[str, Any]) -> None:
        step = fact.get("step")
        if isinstance(step, int):
            self._marks.pop(step, None)
        if self._saving_step in (None, step):
            self._end_of_save(at)

    def _end_of_save(self, at: float) -> None:
        self._saving_step, self._saved_at = None, at
        if self._line.now == SAVING:
            self._line.begin(at, TRAINING)

    def _on_fault_detected(self, at: float, fact: Mapping[str, Any]) -> None:
        since = fact.get("since")
        began = float(since) if isinstance(since, (int, float)) else at
        # A step that was reported later than that proves that training went on.
        self._down(min(at, max(began, self._stepped_at)), str(fact.get("cause", "unknown")), fact, noticed_at=at)

    def _on_stopped(self, at: float, fact: Mapping[str, Any]) -> None:
        self._down(at, str(fact.get("why") or "unknown"), fact)

    def _on_attempt_stopped(self, at: float, fact: Mapping[str, Any]) -> None:
        if self._line.now in (TRAINING, SAVING):
            self._down(max(self._stepped_at, self._line.spans[-1].start), word_of(fact) or "unknown", fact)
        elif self._down_now is not None and self._down_now.attempt == int(fact.get("attempt") or 0):
            self._down_now.cause = word_of(fact) or self._down_now.cause  # the ranks do not know why they were asked

    def _down(self, at: float, cause: str, fact: Mapping[str, Any], *, noticed_at: float | None = None) -> None:
        if self._line.now not in (TRAINING, SAVING) and (self._down_now is not None or self._queued_at is not None):
            return  # one failure has many messengers
        self._ended_attempt = self._attempt
        self._line.begin(at, DOWN)
        at = self._line.spans[-1].start
        self._down_now = Interruption(at, cause, str(fact.get("node") or ""), self._attempt, max(at, noticed_at or at))
        self._stops.append(self._down_now)

    def _on_requeue_started(self, at: float, fact: Mapping[str, Any]) -> None:
        self._requeues += 1
        self._queued_at = at
        if self._down_now is not None:
            self._down_now.requeued = True
        self._line.begin(at, QUEUED)

    def _on_finished(self, at: float, fact: Mapping[str, Any]) -> None:
        self._finished_at = at
        self._line.begin(at, DOWN)

    def _on_run_completed(self, at: float, fact: Mapping[str, Any]) -> None:
        self._complete = True
        self._finished_at = at if self._finished_at is None or self._line.now in (TRAINING, SAVING) else self._finished_at
        self._line.begin(at, DOWN)

    def _on_run_failed(self, at: float, fact: Mapping[str, Any]) -> None:
        self._complete = self._failed = True
        self._line.begin(at, DOWN)

    def result(self, start: float, end: float) -> Account:
        line = self._line
        line.spans[-1].end = max(line.spans[-1].start, end)
        if self._failed:  # nobody will ever use what was not saved
            self._lose(max(self._marks.values(), default=start), end)
        trace, costs = sorted_out(self._stops, self._incidents.all, start, end)
        ledger = Ledger(
            wall_s=end - start,
            productive_s=line.total(TRAINING),
            saving_s=line.total(SAVING),
            lost_s=line.total(LOST),
            restart_s=line.total(DOWN),
            queued_s=line.total(QUEUED),
            failures=len(trace.failures),
            requeues=self._requeues,
        )
        saves = len(self._saves)
        measured = Measured(
            step_s=self._step_s or None,
            interval_s=statistics.median(self._intervals) if self._intervals else None,
            per_save_s=(ledger.productive_s + ledger.lost_s) / saves if saves else None,
            save_s=ledger.saving_s / saves if saves else None,
            first_start_s=self._first_start_s,
            end_s=end - self._finished_at if self._complete and self._finished_at is not None else None,
            **costs,
        )
        return Account(ledger, trace, measured, self._nodes, self._complete, tuple(line.spans))
