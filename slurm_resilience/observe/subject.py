"""Why is this node out, and why was that checkpoint skipped?  All that a run's records say of one node or checkpoint."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_resilience.observe.decisions import about_node
from slurm_resilience.observe.standing import Observer

_Event = Mapping[str, Any]
_WIDTH = 118
_TAB = 21
_MOST = 40


@dataclass
class Subject:
    """A node or a checkpoint.  ``verdict`` is the answer in a sentence; ``said`` has what was told: time, attempt, text."""

    kind: str
    name: str
    verdict: str
    said: list[tuple[float, int, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        told = [{"t": t, "attempt": attempt, "what": text} for t, attempt, text in self.said]
        return {"kind": self.kind, "name": self.name, "verdict": self.verdict, "told": told}

    def page(self, *, columns: int = _WIDTH) -> str:
        """For a person; no line is wider than ``columns``."""
        title = f"{self.kind} {self.name}"
        lines = [title, "=" * len(title), "", *_wrapped(self.verdict, columns), ""]
        hidden = max(0, len(self.said) - _MOST)
        if hidden:
            lines.append(f"({hidden} earlier facts are left out; --json has all of them)")
        for t, attempt, text in self.said[hidden:]:
            stamp = f"{time.strftime('%m-%d %H:%M:%S', time.gmtime(t))}  {f'a{attempt}':<4}"
            first, *rest = _wrapped(text, columns - _TAB) or [""]
            lines += [f"{stamp:<{_TAB}}{first}", *(f"{'':<{_TAB}}{line}" for line in rest)]
        return "\n".join(lines)


def _wrapped(text: str, columns: int) -> list[str]:
    return textwrap.wrap(text, max(20, min(columns, _WIDTH)), break_on_hyphens=False)


# --- nodes --------------------------------------------------------------------------------------------------------------


def node(events: Iterable[_Event], name: str) -> Subject | None:
    """What became of a node in this run, None for one that no event names."""
    observer = Observer()
    found = Subject("node", name, "")
    seen, was_in, since, why = False, False, 0, ""
    for event in events:
        observer.apply(event)
        kind, attempt = str(event["event"]), int(event.get("attempt") or 0)
        text = _of_node(event, name)
        if kind == "attempt_started":
            is_in = name in (event.get("nodes") or ())
            seen = seen or is_in
            if is_in and not was_in:
                text = f"it runs ranks in attempt {attempt}"
                why = ""
            elif was_in and not is_in:
                text, since = f"attempt {attempt} does without it", attempt
            was_in = is_in
        if text:
            seen = True
            found.said.append((float(event["t"]), attempt, text))
            if kind in _REASONS:
                why = text
    if not seen:
        return None
    found.verdict = _node_verdict(observer, name, was_in, since, why)
    return found


# What may be the reason for which a node is left out, the last one counts.
_REASONS = frozenset({"agent_lost", "agent_start_failed", "node_drained", "node_gone", "decided", "requeue_done",
                      "node_suspected", "agent_refused"})  # fmt: skip


def _of_node(event: _Event, name: str) -> str:
    kind = event["event"]
    if kind == "decided":
        return about_node(str(event.get("reason", "")), name)
    if kind == "node_suspected":
        return f"ranks that check each other disagree: {event.get('why')}" if name in (event.get("nodes") or ()) else ""
    if kind == "requeue_done":
        return "the requeue asked Slurm for other nodes" if name in (event.get("excluded") or ()) else ""
    if kind == "supervisor_took_over":
        return "the supervisor was on it, and nothing was heard of it any more" if name == event.get("node") else ""
    if event.get("node") != name:
        return ""
    match kind:
        case "agent_joined":
            return "its agent came back" if event.get("again") else "its agent connected"
        case "agent_warm":
            return "" if event.get("warm") else f"ranks start cold on it: {event.get('reason')}"
        case "agent_lost":
            return f"its agent was given up: {event.get('why')}"
        case "agent_start_failed":
            return f"no agent came up on it (exit code {event.get('exit_code')}): {event.get('detail')}"
        case "agent_refused":
            return f"its agent did not obey ({event.get('what')}): {event.get('why')}"
        case "node_drained":
            return f"somebody drained it: {event.get('reason')} (on_drain: {event.get('policy')})"
        case "node_forgiven":
            return "a user has taken it back"
        case "node_undrained":
            return "it is in service again"
        case "node_gone":
            return f"Slurm took it out of the job: {event.get('why')}"
        case "straggler_found":
            return (
                f"rank {event.get('rank')} on it is slow: {event.get('own_s')} s a step, the others {event.get('others_s')} s"
            )
        case "straggler_recovered":
            return f"rank {event.get('rank')} on it is as fast as the others again"
        case "fault_detected":
            return f"a fault began on it: {event.get('cause')}{_rank(event)}: {event.get('detail', '')}"
    return ""


def _rank(event: _Event) -> str:
    return f", rank {event['rank']}" if event.get("rank") is not None else ""


def _node_verdict(observer: Observer, name: str, is_in: bool, since: int, why: str) -> str:
    standing = observer.standing
    now = standing.nodes.get(name)
    if now is None:
        elsewhere = f"the run is on {' '.join(standing.nodes) or 'no node'}"
        return f"It is not among the nodes of the last allocation: {elsewhere}." + (
            f" The last reason told: {why}." if why else ""
        )
    if is_in:
        return f"It {'was in to the end' if standing.over else 'is in'}: attempt {standing.attempt} has ranks on it."
    if not standing.attempt:
        return f"No attempt has begun yet; its agent is {now.agent}."
    state = {"lost": "its agent is lost", "gone": "Slurm has taken it out of the job"}.get(now.agent, "")
    reason = why or now.why or state
    if reason:
        back = f" `slurm-resilience nodes forgive RUN {name}` takes it back." if " is left out: " in reason else ""
        return f"It is out{f' since attempt {since}' if since else ''}: {reason}.{back}"
    count = sum(node.in_attempt for node in standing.nodes.values())
    return f"It is a spare: its agent is {now.agent}, and attempt {standing.attempt} runs on {count} other nodes."


# --- checkpoints ----------------------------------------------------------------------------------------------------------


_BY_NAME = ("checkpoint_committed", "checkpoint_quarantined", "checkpoint_passed_over")


def checkpoint(events: Iterable[_Event], word: str) -> Subject | None:
    """What became of a checkpoint, by name, the beginning of one, or step; None for one that no event names."""
    found: dict[str, Subject] = {}
    reasons: dict[str, str] = {}
    pending: list[tuple[float, int, str]] = []
    resumed_at: dict[str, int] = {}
    for event in events:
        kind, t, attempt = str(event["event"]), float(event["t"]), int(event.get("attempt") or 0)
        name = str(event.get("name" if kind in _BY_NAME else "checkpoint") or "")
        step = event.get("step")
        if kind == "checkpoint_failed" and str(step) == word:
            pending.append((t, attempt, f"a save of step {step} was given up: {event.get('error')}"))
            continue
        text = _of_checkpoint(event)
        if not text or not name:
            continue
        of_step = str(step) == word and kind in (*_BY_NAME, "resumed")
        if not (name.startswith(word) or of_step):
            continue
        subject = found.setdefault(name, Subject("checkpoint", name, ""))
        subject.said.append((t, attempt, text))
        if kind == "checkpoint_quarantined":
            reasons[name] = f"it was quarantined, because {event.get('reason')}"
        elif kind == "checkpoint_passed_over":
            reasons.setdefault(name, f"attempt {attempt} passed it over, because {event.get('reason')}")
        elif kind == "resumed":
            resumed_at[name] = attempt
    if not found:
        return Subject("checkpoint", f"of step {word}", "It was never committed.", pending) if pending else None
    name = list(found)[-1]
    subject = found[name]
    subject.said = sorted([*pending, *subject.said], key=lambda told: told[0])
    if name in reasons:
        subject.verdict = f"It is skipped: {reasons[name]}."
    elif name in resumed_at:
        subject.verdict = f"It was trusted: attempt {resumed_at[name]} resumed from it."
    else:
        subject.verdict = (
            "Nothing speaks against it in the events, and no attempt has resumed from it: a newer one was taken, or none began."
        )
    others = [other for other in found if other != name]
    if others:
        subject.verdict += f" {len(others)} more of that step or name: {' '.join(others[-4:])}."
    return subject


def _of_checkpoint(event: _Event) -> str:
    match event["event"]:
        case "checkpoint_committed":
            took = f" in {event['seconds']:.2f} s" if isinstance(event.get("seconds"), int | float) else ""
            return f"it was committed at step {event.get('step')}{took}"
        case "checkpoint_quarantined":
            return f"it was quarantined: {event.get('reason')}"
        case "checkpoint_passed_over":
            return f"attempt {event.get('attempt')} passed it over: {event.get('reason')}"
        case "resumed":
            return f"attempt {event.get('attempt')} resumed from it at step {event.get('step')}"
        case "first_steps_checked":
            why = "; ".join(map(str, event.get("reasons") or ()))
            return f"the first steps after it were checked: {event.get('verdict')}{f' ({why})' if why else ''}"
    return ""


def known(events: Iterable[_Event]) -> tuple[Sequence[str], Sequence[str]]:
    """The nodes and the checkpoints that these events name, in order."""
    nodes: dict[str, None] = {}
    checkpoints: dict[str, None] = {}
    for event in events:
        for name in (event.get("node"), *(event.get("nodes") or () if event["event"] != "requeue_started" else ())):
            if isinstance(name, str) and name:
                nodes[name] = None
        if event["event"] == "checkpoint_committed":
            checkpoints[str(event.get("name"))] = None
    return list(nodes), list(checkpoints)
