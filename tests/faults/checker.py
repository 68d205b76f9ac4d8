"""Is this history one that the product promises?  Pure functions from a history to sentences about what is wrong.

They judge the whole history, not the outcome: a run that reached its last step may still have lost a checkpoint,
trained twice at once, or changed its batch on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from tests.faults.history import History

Violations = Iterator[str]
# Replayed on another world size, sums are taken in another order.
SAME_WORLD, OTHER_WORLD = 1e-6, 1e-5
# A fault must be in the record within this time; the slowest detection is a silent node (4 s) plus its lease.  A busy machine
# has longer, as long as what is there cannot be the sign of the next fault.
NOTICED_WITHIN_S, NOTICED_LATE_S = 15.0, 45.0


def check(history: History, *, total_steps: int, keep_last: int) -> list[str]:
    """All violations; empty when the history is as promised."""
    rules: list[Callable[[], Violations]] = [
        lambda: record_is_ordered(history),
        lambda: every_fault_is_in_the_record(history),
        lambda: attempts_only_grow(history),
        lambda: no_committed_checkpoint_is_lost(history, keep_last),
        lambda: attempts_go_on_from_the_last_commit(history),
        lambda: steps_are_consecutive(history, total_steps),
        lambda: replayed_losses_are_equal(history),
        lambda: the_batch_is_constant(history),
        lambda: attempts_never_overlap(history),
        lambda: the_run_finished(history, total_steps),
    ]
    return [sentence for rule in rules for sentence in rule()]


def record_is_ordered(history: History) -> Violations:
    last = 0
    for event in history.events:
        if event["seq"] <= last:
            yield f"event {event['event']} has seq {event['seq']} after {last}: more than one writer, or a lost count"
        last = event["seq"]


def every_fault_is_in_the_record(history: History) -> Violations:
    """A fault test that injected nothing is void; one that nobody noticed was luck."""
    signs = {
        "rank": ("fault_detected",),
        "launcher": ("fault_detected",),
        "agent": ("fault_detected", "agent_lost"),
        "supervisor": ("supervisor_restarted",),
        "node": ("fault_detected", "agent_lost"),
    }
    for fault in history.faults:
        wanted = signs.get(fault.kind)
        if wanted is None:  # slurmctld: training must not even notice
            continue
        following = min((other.t for other in history.faults if other.t > fault.t), default=math.inf)
        within_s = max(NOTICED_WITHIN_S, min(NOTICED_LATE_S, following - fault.t))
        after = [event for event in history.of(*wanted) if fault.t - 1.0 <= event["t"] <= fault.t + within_s]
        if not after:
            sign = " or ".join(wanted)
            yield f"kill of {fault.kind} on {fault.node} at step {fault.step} left no {sign} within {within_s:.0f} s"


def attempts_only_grow(history: History) -> Violations:
    last = 0
    for event in history.of("attempt_started"):
        if event["attempt"] <= last:
            yield f"attempt {event['attempt']} started after attempt {last}"
        last = max(last, event["attempt"])
    newest = 0
    for line in history.curve:
        if line["attempt"] < newest:
            yield f"attempt {line['attempt']} took step {line['step']} after attempt {newest} had begun to train"
        newest = max(newest, line["attempt"])


def no_committed_checkpoint_is_lost(history: History, keep_last: int) -> Violations:
    """Retention may take old ones; the newest ``keep_last`` that were ever committed must still be there."""
    committed: dict[str, int] = {}
    for event in history.of("checkpoint_committed"):
        committed[event["name"]] = event["step"]
    for name, step in sorted(committed.items(), key=lambda item: item[1])[-keep_last:]:
        if name not in history.checkpoints:
            yield f"checkpoint {name} (step {step}) was committed and is gone; there are {sorted(history.checkpoints)}"
        elif history.checkpoints[name] != step:
            yield f"checkpoint {name} was committed at step {step} and now says step {history.checkpoints[name]}"


def attempts_go_on_from_the_last_commit(history: History) -> Violations:
    newest, started_at = 0, dict[int, float]()
    quarantined = set[int]()
    floor: dict[int, int] = {}  # attempt -> the newest step that was committed before it started
    for event in history.events:
        kind, attempt, step = event["event"], event["attempt"], event.get("step")
        if kind == "attempt_started":
            floor[attempt], started_at[attempt] = newest, event["t"]
        elif kind == "checkpoint_committed":
            newer = [other for other, at in started_at.items() if other > attempt and at < event["t"]]
            if newer:
                yield f"attempt {attempt} committed step {step} after attempt {max(newer)} had started: it was not fenced"
            newest = max(newest, event["step"])
        elif kind == "checkpoint_quarantined":
            quarantined.add(event["step"])
        elif kind == "resumed" and event["step"] < floor.get(attempt, 0) and floor[attempt] not in quarantined:
            yield f"attempt {attempt} resumed at step {step} though step {floor[attempt]} was committed before it"
        elif kind == "started_fresh" and floor.get(attempt, 0) > 0 and floor[attempt] not in quarantined:
            yield f"attempt {attempt} started from nothing though step {floor[attempt]} was committed before it"


def steps_are_consecutive(history: History, total_steps: int) -> Violations:
    start = {event["attempt"]: event["step"] for event in history.of("resumed")}
    start.update({event["attempt"]: 0 for event in history.of("started_fresh")})
    last: dict[int, int] = {}
    for line in history.curve:
        attempt, step = line["attempt"], line["step"]
        before = last.get(attempt, start.get(attempt))
        if before is None:
            yield f"attempt {attempt} reports step {step} without having said where it starts"
        elif step != before + 1:
            yield f"attempt {attempt} reports step {step} after step {before}"
        last[attempt] = step
    missing = sorted(set(range(1, total_steps + 1)) - {line["step"] for line in history.curve})
    if missing:
        yield f"steps {missing[:10]} were never taken"


def replayed_losses_are_equal(history: History) -> Violations:
    world = {(line["attempt"], line["step"]): line.get("world") for line in history.curve}
    for step, by_attempt in history.losses().items():
        first, *rest = sorted(by_attempt)
        for attempt in rest:
            limit = SAME_WORLD if world[first, step] == world[attempt, step] else OTHER_WORLD
            was, now = by_attempt[first], by_attempt[attempt]
            if not math.isclose(was, now, rel_tol=limit):
                yield f"step {step}: loss {was!r} in attempt {first}, {now!r} in attempt {attempt}"


def the_batch_is_constant(history: History) -> Violations:
    batches = {}
    for event in history.of("attempt_started"):
        plan = event["plan"]
        batches[event["attempt"]] = plan["global_batch"]
        shares = plan.get("samples_per_dp_rank")
        if shares is not None and sum(shares) != plan["global_batch"]:
            yield f"attempt {event['attempt']} splits {plan['global_batch']} samples into {shares}"
    if len(set(batches.values())) > 1:
        yield f"the global batch changed: {batches}"


def attempts_never_overlap(history: History) -> Violations:
    yield from history.overlaps
    yield from (f"left alive at the end: {sentence}" for sentence in history.left_alive)


def the_run_finished(history: History, total_steps: int) -> Violations:
    done = history.of("run_completed")
    if len(done) != 1:
        yield f"{len(done)} run_completed events; the last fact is {history.events[-1] if history.events else None}"
    elif done[0].get("step") != total_steps:
        yield f"the run completed at step {done[0].get('step')} of {total_steps}"
    if history.state.get("state") != "complete":
        yield f"state.json says {history.state}"
