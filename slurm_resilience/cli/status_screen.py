"""What the screen of ``status`` says: pure functions from what is known of a run to labels and lines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from slurm_resilience.observe.duration import short
from slurm_resilience.observe.incidents import faults, moves, numbered, still_open

if TYPE_CHECKING:
    from slurm_resilience.observe.standing import Standing
    from slurm_resilience.slurm.records import JobRecord

_SHOWN_INCIDENTS = 5
_SHOWN_NODES = 16
# While ranks live, the supervisor writes a live view every few seconds; see runtime/live.py.
_QUIET_S = 30.0

Row = tuple[str, str]


def rows(
    standing: Standing,
    *,
    live: dict[str, Any],
    used: dict[str, int],
    budgets: dict[str, int],
    record: JobRecord | None,
    now: float,
) -> list[Row]:
    """Label and text of each line of the screen.  Pure: ``now`` is wall-clock seconds."""
    out: list[Row] = [("run", f"{standing.run_id or '?'}: {' '.join(standing.argv)}")]
    restarts = f", restart {standing.restart}" if standing.restart else ""
    if standing.job_id:
        slurm = f", {slurm_text(record, now)}" if record is not None else ""
        out.append(("job", f"{standing.job_id}{restarts}{slurm}"))
    out.append(("now", now_text(standing, now, float(live.get("t", 0.0)))))
    if standing.attempt:
        out.append(("attempt", f"{standing.attempt}: {many(standing.world, 'rank')}{_plan(standing)}"))
    if standing.step is not None:
        out.append(("step", _step(standing, now)))
    out += _nodes(standing, live, now)
    out.append(("checkpoint", _checkpoint(standing, now)))
    out += [("quarantined", f"{name}: {reason}") for name, reason in standing.quarantined[-3:]]
    if budgets:
        out.append(("budget", _budget(used, budgets)))
    out += _incidents(standing)
    return out


def now_text(standing: Standing, now: float, seen_at: float) -> str:
    ago = f" for {short(now - standing.since)}" if standing.since is not None and not standing.over else ""
    text = f"{'cancelled' if standing.cancelled else standing.doing}{ago}: {standing.because}"
    if standing.over and standing.last_event_at is not None:
        text += f", {short(now - standing.last_event_at)} ago"
    elif (
        standing.silent_s is None
        and standing.last_event_at is not None
        and now - max(standing.last_event_at, seen_at) > _QUIET_S
    ):
        text += f" (its last word was {short(now - standing.last_event_at)} ago)"
    return text


def slurm_text(record: JobRecord, now: float) -> str:
    text = str(record.state)
    if record.reason and record.reason != "None":
        text += f" ({record.reason})"
    if record.state.running and record.end_at:
        text += f", {short(max(0.0, record.end_at - now))} of its time left"
    if record.state.waiting and record.start_at:
        text += f", Slurm expects it to start in {short(max(0.0, record.start_at - now))}"
    return text


def _plan(standing: Standing) -> str:
    # A plain data-parallel run is one mesh axis as long as the world, whatever it does with it: that says nothing more.
    mesh = {axis: size for axis, size in (standing.plan.get("mesh") or {}).items() if size > 1}
    plain = list(mesh.values()) == [standing.world] and not set(mesh) - {"dp_shard", "dp_replicate"}
    parts = [" x ".join(f"{axis} {size}" for axis, size in mesh.items())] if mesh and not plain else []
    if standing.plan.get("global_batch"):
        parts.append(f"global batch {standing.plan['global_batch']}")
    return f", {', '.join(parts)}" if parts else ""


def _step(standing: Standing, now: float) -> str:
    loss = f", loss {standing.loss:.4f}" if standing.loss is not None else ""
    speed = f", {short(standing.step_s)} a step" if standing.step_s else ""
    age = f", reported {short(now - standing.step_at)} ago" if standing.step_at is not None and not standing.over else ""
    return f"{standing.step}{loss}{speed}{age}"


def _nodes(standing: Standing, live: dict[str, Any], now: float) -> list[Row]:
    if not standing.nodes or standing.over:
        return []
    ranks = live.get("nodes") if live.get("attempt") == standing.attempt else None
    age_s = max(0.0, now - float(live.get("t", now)))
    out: list[Row] = []
    troubled = sorted(standing.nodes.values(), key=lambda node: node.agent in ("warm", "here"))
    for node in troubled[:_SHOWN_NODES]:
        spare = "" if node.in_attempt or not standing.attempt else ", not in this attempt"
        text = f"{node.name}: {node.agent}{spare}{f': {node.why}' if node.why else ''}"
        shown = [f"{_name(standing, rank['rank'])} {_does(rank)}" for rank in (ranks or {}).get(node.name, [])[:8]]
        if shown:  # the view is some seconds old: its steps are behind the newest report, and no rank is silent for that
            text += f"; its ranks as seen {age_s:.1f} s ago:"
        out.append(("node" if not out else "", text + "".join(f"\n  {line}" for line in shown)))
    if len(troubled) > _SHOWN_NODES:
        out.append(("", f"and {len(troubled) - _SHOWN_NODES} more like {troubled[-1].name}: {troubled[-1].agent}"))
    return out


def _name(standing: Standing, rank: int) -> str:
    return f"rank {rank} (pid {standing.pids[rank]})" if rank in standing.pids else f"rank {rank}"


def _does(rank: dict[str, Any]) -> str:
    step = f"at step {rank['step']}, " if rank["step"] >= 0 else ""  # before it has said one
    return f"{step}in {rank['phase']!r}, last beat {rank['age_s']:.1f} s before"


def _checkpoint(standing: Standing, now: float) -> str:
    newest = standing.newest
    if newest is None:
        return "none committed yet" + (f"; {standing.failed_saves} failed" if standing.failed_saves else "")
    size = f", {newest.bytes / 1e6:.1f} MB" if isinstance(newest.bytes, int | float) else ""
    took = f" in {newest.seconds:.2f} s" if isinstance(newest.seconds, int | float) else ""
    failed = f"; {standing.failed_saves} failed" if standing.failed_saves else ""
    return f"step {newest.step} committed{took} {short(now - newest.t)} ago{size} ({standing.committed} so far{failed})"


def _budget(used: dict[str, int], budgets: dict[str, int]) -> str:
    spent = [f"{cause} {count} of {budgets[cause]}" for cause, count in used.items()]
    return f"{', '.join(spent)} spent since the last progress" if spent else "nothing spent since the last progress"


def _incidents(standing: Standing) -> list[Row]:
    out: list[Row] = []
    found = [(number, one) for number, one in numbered(standing.incidents) if number is not None]
    for number, incident in found[-_SHOWN_INCIDENTS:]:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(incident.t))
        where = ", ".join(
            part for part in (incident.node, f"rank {incident.rank}" if incident.rank is not None else None) if part
        )
        end = incident.outcome(open_=still_open(standing.incidents, incident, over=standing.over))
        text = f"{number}. {stamp} {incident.cause}{f' ({where})' if where else ''}: {end}"
        out.append(("" if out else "incidents", text))
    earlier = len(found) - len(out)
    if earlier:
        out.append(("", f"and {earlier} earlier; `slurm-resilience explain` tells about each"))
    out = out or [("incidents", "none")]
    moved = moves(standing.incidents)
    if moved:
        last, often = moved[-1], f", the last of {len(moved)} times" if len(moved) > 1 else ""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(last.t))
        end = last.outcome(open_=still_open(standing.incidents, last, over=standing.over))
        out.append(("requeued", f"{stamp}{often}: {last.detail.partition(';')[0]}: {end}"))
    return out


def many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def change(standing: Standing, record: JobRecord | None) -> tuple[Any, ...]:
    """What is different when something worth a line has happened."""
    nodes = tuple(sorted((node.name, node.agent, node.in_attempt) for node in standing.nodes.values()))
    incidents = (len(standing.incidents), sum(incident.recovered for incident in standing.incidents))
    saved = standing.newest.name if standing.newest is not None else ""
    doing = "training" if standing.doing == "saving" else standing.doing  # its end is the change
    return (doing, standing.attempt, standing.restart, nodes, incidents, saved, len(standing.quarantined),
            standing.failed_saves, str(record.state) if record is not None else "")  # fmt: skip


def change_line(standing: Standing, record: JobRecord | None, now: float, *, name: str) -> str:
    """The run in a line.  Pure: ``now`` is wall-clock seconds."""
    parts = [f"{standing.doing}: {standing.because}"]
    if standing.attempt:
        parts.append(f"attempt {standing.attempt}")
    if standing.step is not None:
        parts.append(f"step {standing.step}{f', loss {standing.loss:.4f}' if standing.loss is not None else ''}")
    if standing.newest is not None:
        parts.append(f"checkpoint of step {standing.newest.step}")
    if faults(standing.incidents):
        parts.append(many(len(faults(standing.incidents)), "incident"))
    if record is not None:
        parts.append(f"job {record.job_id} {record.state}")
    return f"{time.strftime('%H:%M:%S', time.gmtime(now))}  {f'{name}: ' if name else ''}{'; '.join(parts)}"
