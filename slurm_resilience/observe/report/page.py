"""The HTML page: one file, no network, no script; light and dark, on paper and on a phone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from slurm_resilience import __version__
from slurm_resilience.observe.duration import short
from slurm_resilience.observe.incidents import PHASES, Incident, faults, moves, numbered, still_open
from slurm_resilience.observe.references import REFERENCES
from slurm_resilience.observe.report import figures, thinning
from slurm_resilience.observe.report.story import Story

_TEMPLATE = "page.html"
_MOST_SAVES = 40


def render(story: Story, *, now: float | None = None) -> str:
    """The page.  Text from the run is escaped; ``now`` is wall-clock seconds."""
    from jinja2 import Environment, StrictUndefined, select_autoescape
    from markupsafe import Markup

    environment = Environment(
        autoescape=select_autoescape(default=True), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = Path(__file__).with_name(_TEMPLATE).read_text(encoding="utf-8")
    shown = numbered(story.incidents)[-thinning.MOST_INCIDENTS :]
    nodes = sorted(story.standing.nodes.values(), key=lambda node: node.agent not in ("lost", "gone"))
    longest = max((incident.seconds or 0.0 for incident in story.incidents), default=0.0) or 1.0
    return environment.from_string(
        source
    ).render(
        standing=story.standing,
        story=story,
        ledger=story.account.ledger,
        headline=headline(story),
        tiles=tiles(story),
        timeline=Markup(figures.timeline(story)),  # noqa: S704, we drew it, and escaped every word in it
        curve=Markup(figures.curve(story)),  # noqa: S704
        shares=Markup(figures.shares(story)),  # noqa: S704
        time_rows=time_rows(story),
        incidents=[_incident(story, number, one, longest, Markup) for number, one in shown],
        earlier_incidents=len(story.incidents) - len(shown),
        references=(references := {one.cause: one for one in REFERENCES}),
        referred=any(one.cause in references for one in story.recoveries),
        saves=[_save(story, one) for one in story.saves[-_MOST_SAVES:]],
        earlier_saves=max(0, len(story.saves) - _MOST_SAVES),
        nodes=nodes[: thinning.MOST_NODES],
        more_nodes=max(0, len(nodes) - thinning.MOST_NODES),
        short=short,
        stamp=_stamp,
        version=__version__,
        made=_stamp(time.time() if now is None else now),
    )


def headline(story: Story) -> str:
    """One sentence for somebody who has ten seconds."""
    standing, length = story.standing, short(story.end - story.start)
    number = len(faults(story.incidents))
    through = f"through {number} incident{'s' if number != 1 else ''} ({_causes(story)})" if number else "without an incident"
    moved = len(moves(story.incidents))
    if moved:
        through += f" and {'one requeue' if moved == 1 else f'{moved} requeues'} by hand"
    if standing.doing == "complete":
        at = "" if standing.step is None else f" at step {standing.step}"  # a script without a Run tells no step
        return f"Complete{at} after {length}, {through}."
    step = standing.step if standing.step is not None else 0
    if standing.cancelled:
        return f"Ended on purpose at step {step} after {length}, {through}: {standing.because}."
    if standing.doing == "failed":
        return f"Ended without success after {length}, {through}: {standing.because}."
    if standing.doing == "unsupervised":
        return f"Left alone at step {step} after {length}, {through}: {standing.because}."
    return f"{standing.doing.capitalize()} at step {step} after {length}, {through}."


def _causes(story: Story) -> str:
    return ", ".join(f"{one.count} {one.cause}" if one.count > 1 else one.cause for one in story.recoveries)


def tiles(story: Story) -> list[tuple[str, str, str]]:
    """Value, name and explanation of the figures on top."""
    struck = faults(story.incidents)
    back = sorted(incident.seconds for incident in struck if incident.seconds is not None)
    survived = sum(incident.recovered for incident in struck)
    ledger = story.account.ledger
    return [
        (f"{ledger.ettr:.0%}", "effective time", "training that was kept, of all time since the start (ETTR)"),
        (f"{survived} of {len(struck)}", "incidents survived", "came back to training by themselves")
        if struck
        else ("0", "incidents", "nothing went wrong"),
        (
            short(back[len(back) // 2]) if back else "–",
            "median way back",
            "from the fault to the first step after it",
        ),
        (_done_again(story), "steps done again", "since the last checkpoint before each fault"),
        (str(ledger.requeues), "requeues", "times that the job needed a new allocation"),
    ]


def _done_again(story: Story) -> str:
    """The number of steps; "< 1" where a fault took a part of one, whose time is in the account of time."""
    back = [incident for incident in story.incidents if incident.recovered]
    part = story.account.ledger.lost_s > 0 and bool(back) and all(incident.steps_lost == 0 for incident in back)
    return "< 1" if part else str(story.steps_lost)


def time_rows(story: Story) -> list[tuple[str, str, str, str]]:
    """Kind, name, time and share of each part of the run's time."""
    ledger = story.account.ledger
    values = (ledger.productive_s, ledger.saving_s, ledger.lost_s, ledger.restart_s, ledger.queued_s)
    total = ledger.wall_s or 1.0
    return [
        (kind, figures.KIND_NAMES[kind], short(value), f"{value / total:.1%}")
        for kind, value in zip(figures.KINDS, values, strict=True)
    ]


def _incident(story: Story, number: int | None, incident: Incident, longest: float, safe: Any) -> dict[str, Any]:
    measured = {name: incident.phases[name] for name in PHASES if name in incident.phases}
    colours = figures.phase_colours(measured)
    open_ = still_open(story.incidents, incident, over=story.standing.over)
    return {
        "number": number,
        "outcome": incident.outcome(open_=open_),
        "bad": incident.fault and not incident.recovered and not open_,
        "at": _stamp(incident.t),
        "cause": incident.cause,
        "where": ", ".join(
            part for part in (incident.node, None if incident.rank is None else f"rank {incident.rank}") if part
        ),
        "detail": incident.detail,
        "lost": incident.steps_lost,
        "phases": [
            (name.replace("_", " "), short(at), colours.get(name, "")) for name, at in measured.items() if name != "fault"
        ],
        "drawing": safe(figures.phases(measured, max(longest, *measured.values()))) if incident.fault else "",
    }


def _save(story: Story, saved: Any) -> dict[str, Any]:
    return {
        "at": short(saved.t - story.start),
        "step": saved.step,
        "name": saved.name,
        "state": saved.state,
        "took": short(saved.seconds) if isinstance(saved.seconds, int | float) else "",
        "size": f"{saved.bytes / 1e6:,.1f} MB" if isinstance(saved.bytes, int | float) else "",
        "why": saved.why,
    }


def _stamp(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(t))
