"""How runs stand: what a run does now and what it waits for, its nodes and ranks, checkpoints, incidents, budgets.

Without a name: one line for each of your resilient jobs in Slurm's queue.  RUN is a run folder or a job id.  Only
records are read, so a run is disturbed by nobody looking at it; accounting is not needed.  --watch redraws a terminal, and
writes a line for each change into anything else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_resilience._atomic import read_json
from slurm_resilience.cli import which_run
from slurm_resilience.errors import ConfigError, ExitCode, SlurmError
from slurm_resilience.observe.duration import short

if TYPE_CHECKING:
    from slurm_resilience.observe.standing import Standing
    from slurm_resilience.slurm.records import JobRecord

_WATCH_S = 1.0
# How often a mere step is a change, where each change is a line.
_STEP_LINE_S = 30.0
_SHOWN_INCIDENTS = 5
_SHOWN_NODES = 16
# While ranks live, the supervisor writes a live view every few seconds; see runtime/live.py.
_QUIET_S = 30.0

Row = tuple[str, str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run folder or a job id (default: all your resilient jobs)")
    parser.add_argument("--watch", action="store_true", help="go on until the run is over, or Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def execute(args: argparse.Namespace) -> int:
    """Print it."""
    if args.watch and args.json:
        raise ConfigError(
            "--watch is for people, --json for programs", remedy="`events --follow --json` prints facts as they come"
        )
    if args.run is None:
        return _all_jobs(as_json=args.json, watch=args.watch)
    if args.watch and not sys.stdout.isatty():
        _tell_changes(lambda: [_look(args.run)])
    elif args.watch:
        _watch(lambda: _one(args.run))
    elif args.json:
        print(json.dumps(_document(*_look(args.run)), default=str))
    else:
        _print(_one(args.run)[0])
    return int(ExitCode.OK)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Everything that is known of one run."""

    folder: Path
    standing: Standing
    live: dict[str, Any]
    used: dict[str, int]
    budgets: dict[str, int]


def _look(word: str) -> tuple[_Seen, JobRecord | None]:
    from slurm_resilience.observe.events import FILE_NAME

    folder, record = which_run.find(word)
    if not (folder / FILE_NAME).exists() and not which_run.is_run(folder):
        raise ConfigError(
            f"There is no run in {folder}",
            evidence=f"it has neither run.json nor {FILE_NAME}",
            remedy="give the folder that `slurm-resilience run` names in its first line, or a job id",
        )
    seen = _see(folder)
    if record is None and seen.standing.job_id.partition("_")[0].isdigit() and not seen.standing.over:
        record = _ask(seen.standing.job_id, folder)
    return seen, record


def _see(folder: Path) -> _Seen:
    from slurm_resilience.observe.events import read_for_standing
    from slurm_resilience.observe.standing import Observer, look_for_supervisor
    from slurm_resilience.runtime.history import History

    observer, history = Observer(), History()
    for event in read_for_standing(folder):
        observer.apply(event)
        history.apply(event)
    run = read_json(folder / "run.json")
    budgets = dict((run.get("config") or {}).get("budgets") or {}) if isinstance(run, dict) else {}
    if isinstance(run, dict) and not observer.standing.run_id:
        observer.standing.run_id, observer.standing.argv = str(run.get("run_id", "")), tuple(map(str, run.get("argv") or ()))
    look_for_supervisor(observer.standing, folder, now=time.time())
    live = read_json(folder / "live.json")
    used = {cause: history.count(cause) for cause in budgets if history.count(cause)}
    return _Seen(folder, observer.standing, live if isinstance(live, dict) else {}, used, budgets)


def _ask(job_id: str, folder: Path) -> JobRecord | None:
    """Slurm's word on the job, None when it has none; job ids come round again, so the folder must be the same."""
    from slurm_resilience.slurm.client import CommandClient

    try:
        record = CommandClient(timeout_s=3.0).job(job_id)
    except SlurmError:
        return None
    found = which_run.of_job(record)
    return record if found is not None and os.path.samefile(found, folder) else None


# --- for people -------------------------------------------------------------------------------------------------------


def _one(word: str) -> tuple[list[Row], bool]:
    """The rows of one run's screen, and whether the run is over."""
    seen, record = _look(word)
    return rows(seen.standing, live=seen.live, used=seen.used, budgets=seen.budgets, record=record, now=time.time()), (
        seen.standing.over
    )


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
        slurm = f", {_slurm(record, now)}" if record is not None else ""
        out.append(("job", f"{standing.job_id}{restarts}{slurm}"))
    out.append(("now", _now(standing, now, float(live.get("t", 0.0)))))
    if standing.attempt:
        out.append(("attempt", f"{standing.attempt}: {standing.world} ranks{_plan(standing)}"))
    if standing.step is not None:
        out.append(("step", _step(standing, now)))
    out += _nodes(standing, live, now)
    out.append(("checkpoint", _checkpoint(standing, now)))
    out += [("quarantined", f"{name}: {reason}") for name, reason in standing.quarantined[-3:]]
    if budgets:
        out.append(("budget", _budget(used, budgets)))
    out += _incidents(standing)
    return out


def _now(standing: Standing, now: float, seen_at: float) -> str:
    ago = f" for {short(now - standing.since)}" if standing.since is not None and not standing.over else ""
    text = f"{standing.doing}{ago}: {standing.because}"
    if standing.over and standing.last_event_at is not None:
        text += f", {short(now - standing.last_event_at)} ago"
    elif standing.last_event_at is not None and now - max(standing.last_event_at, seen_at) > _QUIET_S:
        text += f" (its last word was {short(now - standing.last_event_at)} ago)"
    return text


def _slurm(record: JobRecord, now: float) -> str:
    text = str(record.state)
    if record.reason and record.reason != "None":
        text += f" ({record.reason})"
    if record.state.running and record.end_at:
        text += f", {short(max(0.0, record.end_at - now))} of its time left"
    if record.state.waiting and record.start_at:
        text += f", Slurm expects it to start in {short(max(0.0, record.start_at - now))}"
    return text


def _plan(standing: Standing) -> str:
    mesh = {axis: size for axis, size in (standing.plan.get("mesh") or {}).items() if size > 1}
    parts = [" x ".join(f"{axis} {size}" for axis, size in mesh.items())] if mesh else []
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
        shown = [
            f"rank {rank['rank']} step {rank['step']} {rank['phase']} {rank['age_s'] + age_s:.1f} s ago"
            for rank in (ranks or {}).get(node.name, [])[:8]
        ]
        out.append(("node" if not out else "", text + "".join(f"\n  {line}" for line in shown)))
    if len(troubled) > _SHOWN_NODES:
        out.append(("", f"and {len(troubled) - _SHOWN_NODES} more like {troubled[-1].name}: {troubled[-1].agent}"))
    return out


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
    for incident in standing.incidents[-_SHOWN_INCIDENTS:]:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(incident.t))
        where = ", ".join(
            part for part in (incident.node, f"rank {incident.rank}" if incident.rank is not None else None) if part
        )
        end = f"back in {incident.seconds:.1f} s" if incident.seconds is not None else "not back yet"
        if incident.seconds is None and (standing.over or incident is not standing.incidents[-1]):
            end = "did not come back"
        out.append(("" if out else "incidents", f"{stamp} {incident.cause}{f' ({where})' if where else ''}: {end}"))
    earlier = len(standing.incidents) - len(out)
    if earlier:
        out.append(("", f"and {earlier} earlier; `slurm-resilience explain` tells about each"))
    return out or [("incidents", "none")]


def _print(lines: list[Row]) -> None:
    from rich.console import Console

    Console(highlight=False, soft_wrap=False).print(_grid(lines))


def _grid(lines: list[Row]) -> Any:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(label, Text(text))
    return grid


def _watch(look: Any) -> None:
    """Redraw until the run is over."""
    from rich.live import Live

    lines, over = look()
    with Live(_grid(lines), refresh_per_second=4, screen=False) as live:
        while not over:
            time.sleep(_WATCH_S)
            lines, over = look()
            live.update(_grid(lines))


def _tell_changes(look: Callable[[], Sequence[tuple[_Seen, JobRecord | None]]]) -> None:
    """A line for each change, until all of those runs are over; steps alone are one now and then."""
    told: dict[Path, tuple[Any, int | None, float]] = {}
    while True:
        jobs = look()
        for seen, record in jobs:
            now, step = time.time(), seen.standing.step
            key = change(seen.standing, record)
            before = told.get(seen.folder)
            if before is None or key != before[0] or (step != before[1] and now - before[2] >= _STEP_LINE_S):
                told[seen.folder] = (key, step, now)
                print(change_line(seen.standing, record, now, name="" if len(jobs) == 1 else seen.folder.name), flush=True)
        if jobs and all(seen.standing.over for seen, _ in jobs):
            return
        time.sleep(_WATCH_S)


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
    if standing.incidents:
        parts.append(f"{len(standing.incidents)} incidents")
    if record is not None:
        parts.append(f"job {record.job_id} {record.state}")
    return f"{time.strftime('%H:%M:%S', time.gmtime(now))}  {f'{name}: ' if name else ''}{'; '.join(parts)}"


# --- many jobs --------------------------------------------------------------------------------------------------------


def _all_jobs(*, as_json: bool, watch: bool) -> int:
    if watch and not sys.stdout.isatty():
        _tell_changes(_jobs)
    elif watch:
        _watch(lambda: (_overview(_jobs()), False))
    elif as_json:
        print(json.dumps([_document(seen, record) for seen, record in _jobs()], default=str))
    else:
        _print(_overview(_jobs()))
    return int(ExitCode.OK)


def _jobs() -> list[tuple[_Seen, JobRecord]]:
    import getpass

    from slurm_resilience.slurm.client import CommandClient

    found = []
    for record in CommandClient(timeout_s=5.0).jobs(getpass.getuser()):
        folder = which_run.of_job(record)
        if folder is not None:
            found.append((_see(folder), record))
    return found


def _overview(jobs: list[tuple[_Seen, JobRecord]]) -> list[Row]:
    now = time.time()
    lines = []
    for seen, record in jobs:
        standing = seen.standing
        step = f", step {standing.step}" if standing.step is not None else ""
        trouble = f", {len(standing.incidents)} incidents" if standing.incidents else ""
        doing = f"{standing.doing}: {standing.because}"
        lines.append((record.job_id, f"{record.name}: {_slurm(record, now)}; {doing}{step}{trouble}\n  {seen.folder}"))
    return lines or [
        ("", "You have no resilient job in Slurm's queue; `slurm-resilience status RUN_DIR` shows one that is over")
    ]


# --- for programs -----------------------------------------------------------------------------------------------------


def _document(seen: _Seen, record: JobRecord | None) -> dict[str, Any]:
    """Everything on the screen as plain values; times are wall-clock seconds."""
    plain = dataclasses.asdict(dataclasses.replace(seen.standing, incidents=[]))
    plain["incidents"] = [incident.as_dict() for incident in seen.standing.incidents]
    plain["quarantined"] = [{"name": name, "reason": reason} for name, reason in seen.standing.quarantined]
    slurm = None if record is None else {"state": str(record.state), "reason": record.reason, "restarts": record.restarts}
    return {
        "v": 1,
        "run_dir": str(seen.folder),
        **plain,
        "budgets": {cause: {"used": seen.used.get(cause, 0), "allowed": most} for cause, most in seen.budgets.items()},
        "live": seen.live or None,
        "slurm": slurm,
    }
