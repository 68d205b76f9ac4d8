"""How runs stand: what a run does now and what it waits for, its nodes and ranks, checkpoints, incidents, budgets.

Without a name: one line for each of your resilient jobs in Slurm's queue.  RUN is a run folder or a job id.  Only
records are read, so a run is disturbed by nobody looking at it; accounting is not needed.  --watch redraws a terminal, and
writes a line for each change into anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_resilience._atomic import read_json
from slurm_resilience.cli import which_run
from slurm_resilience.cli.document import document
from slurm_resilience.errors import ConfigError, ExitCode, SlurmError

if TYPE_CHECKING:
    from slurm_resilience.cli.status_screen import Row
    from slurm_resilience.observe.standing import Standing
    from slurm_resilience.slurm.records import JobRecord

_WATCH_S = 1.0
# How often a mere step is a change, where each change is a line.
_STEP_LINE_S = 30.0
_SHOWN_RUNS = 10


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
        from slurm_resilience.observe.json_text import dumps

        print(dumps(_document(*_look(args.run))))
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
    from slurm_resilience.observe.standing_in_slurm import look_at_slurm

    folder, record = which_run.find(word)
    if not (folder / FILE_NAME).exists() and not which_run.is_run(folder):
        raise ConfigError(
            f"There is no run in {folder}",
            evidence=f"it has neither run.json nor {FILE_NAME}",
            remedy="give the folder that `slurm-resilience run` names in its first line, or a job id",
        )
    seen = _see(folder)
    # Before its first start only the submission knows what the run is in Slurm.
    seen.standing.job_id = seen.standing.job_id or _submitted_as(folder)
    gone = False
    if record is None and _in_slurm(seen.standing.job_id) and not seen.standing.over:
        record, gone = _ask(seen.standing.job_id, folder)
    if not seen.standing.over and (gone or (record is not None and record.state.ended)):
        newer = _newer_job(folder, seen.standing.job_id)
        if newer is not None:
            record, gone = newer, False
        else:  # it may have ended well since its events were read
            seen = _see(folder)
            seen.standing.job_id = seen.standing.job_id or _submitted_as(folder)
    look_at_slurm(seen.standing, record, forgotten=gone)
    return seen, record


def _newer_job(folder: Path, old: str) -> JobRecord | None:
    """The job that the run was submitted as again, by itself or by its user, if no supervisor of it has spoken yet."""
    job_id = _submitted_as(folder)
    return _ask(job_id, folder)[0] if _in_slurm(job_id) and job_id != old else None


def _in_slurm(job_id: str) -> bool:
    return job_id.partition("_")[0].isdigit()


def _submitted_as(folder: Path) -> str:
    """The job that was last submitted for the run, "" for one that is not in Slurm."""
    return str(document(folder / "job.json").get("job_id") or "")


def _see(folder: Path) -> _Seen:
    from slurm_resilience.observe.events import read_for_standing
    from slurm_resilience.observe.standing import Observer, look_for_supervisor
    from slurm_resilience.runtime.history import History

    observer, history = Observer(), History()
    for event in read_for_standing(folder):
        observer.apply(event)
        history.apply(event)
    run = document(folder / "run.json")
    budgets = dict((run.get("config") or {}).get("budgets") or {})
    if run and not observer.standing.run_id:
        observer.standing.run_id, observer.standing.argv = str(run.get("run_id", "")), tuple(map(str, run.get("argv") or ()))
    look_for_supervisor(observer.standing, folder, now=time.time())
    live: Any = None
    with contextlib.suppress(OSError, ValueError):  # nothing depends on it
        live = read_json(folder / "live.json")
    used = {cause: history.count(cause) for cause in budgets if history.count(cause)}
    return _Seen(folder, observer.standing, live if isinstance(live, dict) else {}, used, budgets)


def _ask(job_id: str, folder: Path) -> tuple[JobRecord | None, bool]:
    """Slurm's word on the job, None when it has none; and whether it answered that it does not know the job.

    Job ids come round again, so the folder must be the same.
    """
    from slurm_resilience.slurm.client import CommandClient
    from slurm_resilience.slurm.failures import NoSuchJob

    try:
        record = CommandClient(timeout_s=3.0).job(job_id)
    except NoSuchJob:
        return None, True
    except SlurmError:
        return None, False
    return (record if which_run.is_of(record, folder) else None), False


# --- for people -------------------------------------------------------------------------------------------------------


def _one(word: str) -> tuple[list[Row], bool]:
    """The rows of one run's screen, and whether the run is over."""
    from slurm_resilience.cli.status_screen import rows

    seen, record = _look(word)
    shown = rows(seen.standing, live=seen.live, used=seen.used, budgets=seen.budgets, record=record, now=time.time())
    return shown, _nothing_more(seen.standing, record)


def _nothing_more(standing: Standing, record: JobRecord | None) -> bool:
    """There is nothing to wait for: it is over, or nobody looks after it and no job of it is left that could."""
    there = record is not None and not record.state.ended
    return standing.over or (standing.doing == "unsupervised" and not there)


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
    from slurm_resilience.cli.status_screen import change, change_line

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
        if jobs and all(_nothing_more(seen.standing, record) for seen, record in jobs):
            return
        time.sleep(_WATCH_S)


# --- many jobs --------------------------------------------------------------------------------------------------------


def _all_jobs(*, as_json: bool, watch: bool) -> int:
    if watch and not sys.stdout.isatty():
        _tell_changes(_jobs)
    elif watch:
        _watch(lambda: (_overview(_jobs()), False))
    elif as_json:
        from slurm_resilience.observe.json_text import dumps

        print(dumps([_document(seen, record) for seen, record in _jobs()]))
    else:
        _print(_overview(_jobs()))
    return int(ExitCode.OK)


def _jobs() -> Sequence[tuple[_Seen, JobRecord | None]]:
    """Your resilient jobs in Slurm's queue; where there is no Slurm, or no answer, the newest runs below this folder.

    Raises :class:`SlurmError` when Slurm does not answer, :class:`ConfigError` where there is neither it nor a run.
    """
    import getpass
    import shutil

    from slurm_resilience.observe.standing_in_slurm import look_at_slurm
    from slurm_resilience.slurm.client import CommandClient

    if shutil.which("squeue") is None:
        return _runs_here()
    try:
        records = CommandClient(timeout_s=5.0).jobs(getpass.getuser())
    except SlurmError as error:
        if not which_run.below(Path.cwd()):
            raise
        print(f"Slurm does not answer ({error.what}); these are the newest runs below this folder:", file=sys.stderr)
        return _runs_here()
    found = []
    for record in records:
        folder = which_run.of_job(record)
        if folder is not None:
            seen = _see(folder)
            look_at_slurm(seen.standing, record)
            found.append((seen, record))
    return found


def _runs_here() -> list[tuple[_Seen, JobRecord | None]]:
    folders = which_run.below(Path.cwd())[:_SHOWN_RUNS]
    if not folders:
        raise ConfigError(
            "There is no Slurm here, and no run",
            evidence=f"squeue is not on PATH, and neither {Path.cwd()} nor two levels of folders below it hold a run",
            remedy="give the folder that `slurm-resilience run` names in its first line",
        )
    return [(_see(folder), None) for folder in folders]


def _overview(jobs: Sequence[tuple[_Seen, JobRecord | None]]) -> list[Row]:
    from slurm_resilience.cli.status_screen import many, now_text, slurm_text
    from slurm_resilience.observe.incidents import faults

    now = time.time()
    lines = []
    for seen, record in jobs:
        standing = seen.standing
        step = f", step {standing.step}" if standing.step is not None else ""
        trouble = f", {many(len(faults(standing.incidents)), 'incident')}" if faults(standing.incidents) else ""
        doing = now_text(standing, now, float(seen.live.get("t", 0.0)))
        if record is None:
            lines.append((standing.run_id or seen.folder.name, f"{doing}{step}{trouble}\n  {seen.folder}"))
        else:
            lines.append((record.job_id, f"{record.name}: {slurm_text(record, now)}; {doing}{step}{trouble}\n  {seen.folder}"))
    nothing = (
        "You have no resilient job in Slurm's queue (tasks of an array that still wait are not looked at); "
        "`slurm-resilience status RUN_DIR` shows such a task, or a run that is over"
    )
    return lines or [("", nothing)]


# --- for programs -----------------------------------------------------------------------------------------------------


def _document(seen: _Seen, record: JobRecord | None) -> dict[str, Any]:
    """Everything on the screen as plain values; times are wall-clock seconds."""
    from slurm_resilience.observe.incidents import numbered

    plain = dataclasses.asdict(dataclasses.replace(seen.standing, incidents=[]))
    plain["incidents"] = [{"number": number, **one.as_dict()} for number, one in numbered(seen.standing.incidents)]
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
