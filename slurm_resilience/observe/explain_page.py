"""One incident as a page that a person reads from the top: what, where, why, how long, what was done about it."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurm_resilience.observe.duration import short
from slurm_resilience.observe.explain import MEANS, Explanation
from slurm_resilience.observe.failures import MOVED_BY_HAND

_WIDTH = 118
_TAB = 13
_ECHOES, _ECHO_CHARS = 3, 160
_TRACE_HEAD = 5
_TRACE_LINES, _TAIL_LINES, _KERNEL_LINES, _RANKS = 12, 8, 5, 8
_NAMES = {"first_step": "first step", "caught_up": "caught up"}


def page(one: Explanation, *, number: int | None, of: int, columns: int = _WIDTH) -> str:
    """The page, no wider than ``columns`` but for what it quotes; ``number`` is None for what was ended on purpose."""
    lines = [_title(one, number, of), ""]
    for label, texts in _parts(one):
        for position, text in enumerate(texts):
            lines += wrapped(label if position == 0 else "", text, columns)
    return "\n".join(lines)


def _title(one: Explanation, number: int | None, of: int) -> str:
    where = _where(one.incident.rank, one.incident.node)
    on_purpose = "Moved on purpose" if one.cause == MOVED_BY_HAND else "Ended on purpose"
    name = on_purpose if number is None else f"Incident {number} of {of}"
    title = f"{name}: {one.cause}{f', {where}' if where else ''}"
    return f"{title}\n{'=' * len(title)}"


def _parts(one: Explanation) -> Iterator[tuple[str, list[str]]]:
    found, record = one.incident, one.record or {}
    step = f", at step {found.step}" if found.step is not None and found.step >= 0 else ""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.t))
    yield "when", [f"{stamp} UTC, attempt {found.attempt}{step}"]
    yield "what", [MEANS.get(one.cause, one.cause)]
    detail = found.detail or "nothing more is known"
    if one.first is not None:  # the cause before what it looked like from outside
        yield "first", list(_exception(one.first))
    if one.first is None or _flat(detail) != _flat(f"{one.first.get('type')}: {one.first.get('message')}"):
        yield "why", [detail]
    if one.echoes:
        yield "echoes", list(_echoes(one.echoes))
    if one.failed_saves:
        last = one.failed_saves[-1]
        often = f"; so did {len(one.failed_saves) - 1} before it" if len(one.failed_saves) > 1 else ""
        yield "saves", [f"the checkpoint of step {last['step']} failed: {last['error']}{often}"]
    ends = [each for each in record.get("ends", ()) if one.first is None or each["rank"] != one.first.get("rank")]
    if ends:
        yield "ends", [_end(each) for each in ends[:_RANKS]] + _more(ends)
    own = next((each for each in record.get("ends", ()) if each["rank"] == found.rank and each.get("tail")), None)
    if own is not None and one.first is None:
        yield "last words", [f"| {line}" for line in own["tail"][-_TAIL_LINES:]]
    doing = record.get("doing") or []
    if doing:
        yield "doing", [f"{_ranks(each['ranks'])}: {each['what']}" for each in doing[:_RANKS]] + _more(doing)
    look = (record.get("looks") or {}).get(str(found.rank))
    if isinstance(look, dict) and look.get("stacks"):
        main = str(look["stacks"]).strip().split("\n\n")[-1].splitlines()
        yield "its stack", [f"| {line.strip()}" for line in main[1 : _TRACE_LINES + 1]]
    for node, lines in sorted((record.get("kernel") or {}).items()):
        yield "kernel", [f"{node}: {line}" for line in lines[-_KERNEL_LINES:]]
    yield "times", [_phases(one)]
    decided = [event for event in one.followed_by if event["event"] == "decided"]
    if decided:
        yield "decided", [f"{event['action']}: {event['reason']}" for event in decided]
    then = list(_then(one))
    if then:
        yield "then", then


def _exception(first: Mapping[str, Any]) -> Iterator[str]:
    message = str(first.get("message", "")).splitlines()
    at = time.strftime("%H:%M:%S", time.gmtime(float(first.get("t", 0))))
    yield f"{first.get('type')}: {message[0] if message else ''}  ({_where(first.get('rank'), first.get('node'))}, {at})"
    trace = [line for line in str(first.get("traceback", "")).rstrip().splitlines() if line.strip()]
    if len(trace) > _TRACE_LINES:  # where the user's code began, and where it ended
        trace = [*trace[:_TRACE_HEAD], f"  … {len(trace) - _TRACE_LINES} lines …", *trace[_TRACE_HEAD - _TRACE_LINES :]]
    yield from (f"| {line}" for line in trace)


def _echoes(echoes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for each in echoes[:_ECHOES]:
        message = " ".join(str(each.get("message", "")).split())
        yield f"{_where(each.get('rank'), each.get('node'))}: {each.get('type')}: {_cut(message, _ECHO_CHARS)}"
    if len(echoes) > _ECHOES:
        yield f"and {len(echoes) - _ECHOES} more"


def _flat(text: object) -> str:
    return " ".join(str(text or "").split())


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def _end(each: Mapping[str, Any]) -> str:
    how = f"killed by {each['signal'] or -each['code']}" if each["code"] < 0 else f"exit code {each['code']}"
    oom = f"; {each['oom']}" if each.get("oom") else ""
    return f"rank {each['rank']} on {each['node']}: {how}{oom}"


def _phases(one: Explanation) -> str:
    phases = one.incident.as_dict()["phases"]
    shown = [f"{_NAMES.get(name, name)} {seconds:.2f} s" for name, seconds in phases.items() if name != "fault"]
    end = one.incident.outcome()
    if one.taken_up is not None and one.incident.seconds is None:
        end += f"; the run was taken up again {short(one.taken_up - one.incident.t)} later"
    return "; ".join(filter(None, [", ".join(shown), end]))


def _then(one: Explanation) -> Iterator[str]:
    for event in one.followed_by:
        match event["event"]:
            case "attempt_started":
                ranks = f"{event['world']} rank{'s' if event['world'] != 1 else ''}"
                yield f"attempt {event['attempt']} was launched: {ranks} on {' '.join(event['nodes'])}"
            case "attempt_adopted":
                yield f"the new supervisor found attempt {event['attempt']} alive and let it go on; nothing was lost"
            case "resumed":
                lost = one.incident.steps_lost
                again = f"; {lost} step{'s' if lost != 1 else ''} to do again" if lost is not None else ""
                yield f"it resumed at step {event.get('step')} from {event.get('checkpoint')}{again}"
            case "started_fresh":
                yield "there was no checkpoint: it started at step 0"
            case "checkpoint_passed_over":
                yield f"checkpoint {event.get('name')} was passed over: {event.get('reason')}"
            case "checkpoint_quarantined":
                yield f"checkpoint {event.get('name')} was quarantined: {event.get('reason')}"
            case "supervisor_restarted":
                yield "a new supervisor took over in the same allocation"
            case "supervisor_took_over":
                yield f"a surviving agent took the place of the supervisor, which {event.get('node')} had taken with it"
            case "agent_lost":
                yield f"the agent of {event['node']} was given up: {event['why']}"
            case "node_gone":
                yield f"{event['node']} left the job: {event['why']}"
            case "requeue_done":
                yield "Slurm queued the job again"
            case "requeue_failed":
                yield f"Slurm did not queue the job again: {event.get('reason')}"
            case "allocation_started":
                yield f"the next allocation began on {' '.join(event['nodes'])}"
            case "run_failed":
                told = {one.incident.detail, *(each.get("reason") for each in one.followed_by if each["event"] == "decided")}
                why = "" if event["reason"] in told else f": {event['reason']}"
                yield f"the run ended with exit code {event['exit_code']}{why}"
            case "run_completed":
                yield f"the run was complete at step {event.get('step')}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = " ".join(map(str, ranks[:_RANKS]))
    return f"ranks {shown}{f' and {len(ranks) - _RANKS} more' if len(ranks) > _RANKS else ''}"


def _more(items: list[Any]) -> list[str]:
    return [f"and {len(items) - _RANKS} more"] if len(items) > _RANKS else []


def _where(rank: object, node: object) -> str:
    return " on ".join(part for part in (f"rank {rank}" if rank is not None else "", str(node or "")) if part)


def wrapped(label: str, text: str, columns: int = _WIDTH) -> list[str]:
    """A label, and beside it the text in lines of at most ``columns``, but for quoted ones."""
    width = max(20, min(columns, _WIDTH) - _TAB)
    lines: list[str] = []
    for line in text.splitlines() or [""]:
        if line.startswith("| "):  # quoted: as it was
            lines.append(line)
        else:
            lines += textwrap.wrap(line, width, break_long_words=columns < _WIDTH, break_on_hyphens=False) or [""]
    return [f"{(label if position == 0 else ''):<{_TAB}}{line}".rstrip() for position, line in enumerate(lines)]
