"""Which run folder is meant by a word on the command line: a folder, or the number of a job.

A job leads to its folder by what Slurm keeps of it: the script that `submit` wrote into the folder, the first line that our
supervisor put into the job's log, or the place where the shipped template puts runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_resilience.errors import ConfigError, SlurmError

if TYPE_CHECKING:
    from slurm_resilience.slurm.client import SlurmClient
    from slurm_resilience.slurm.records import JobRecord

_JOB_ID = re.compile(r"\d+(?:_\d+)?")
# What `slurm-resilience run` prints first.
_FIRST_LINE = re.compile(rb"^slurm-resilience: run \S+ in (/.*)$", re.MULTILINE)
# The same, with observe.log_format: json.
_FIRST_OBJECT = re.compile(rb'^\{.*"run_dir": ("/(?:[^"\\]|\\.)*")\}$', re.MULTILINE)
_LOOK_BYTES = 1 << 20


def find(word: str, client: SlurmClient | None = None) -> tuple[Path, JobRecord | None]:
    """The run folder, and the job's record where ``word`` is a job.  Raises :class:`ConfigError` when there is none."""
    path = Path(word)
    if path.is_dir() or not _JOB_ID.fullmatch(word):
        if not path.is_dir():
            raise ConfigError(
                f"{word} is neither a folder nor the number of a job",
                remedy="give the folder that `slurm-resilience run` names in its first line, or a job id",
            )
        return path, None
    if client is None:
        from slurm_resilience.slurm.client import CommandClient

        client = CommandClient(timeout_s=5.0)
    try:
        record = client.job(word)
    except SlurmError as error:
        raise ConfigError(
            f"Slurm does not say which run job {word} is",
            evidence=str(error),
            remedy="a job that is over is forgotten after MinJobAge: give its run folder instead",
        ) from error
    folder = of_job(record)
    if folder is None:
        raise ConfigError(
            f"Job {word} has no run folder that can be seen from here",
            evidence=f"its script is {record.command or 'unknown'}, its log {record.std_out or 'unknown'}",
            remedy="if it runs `slurm-resilience run --run-dir DIR`, give DIR",
        )
    return folder, record


def newest() -> Path:
    """The run that is meant where none is named: RESILIENCE_RUN_DIR, else the newest below this folder.

    Raises :class:`ConfigError` when there is none.
    """
    given = os.environ.get("RESILIENCE_RUN_DIR")
    found = [Path(given)] if given else below(Path.cwd())
    if not found:
        raise ConfigError(
            "There is no run here",
            evidence=f"neither {Path.cwd()} nor two levels of folders below it hold one",
            remedy="give the folder that `slurm-resilience run` names in its first line, or a job id",
        )
    return found[0]


def below(here: Path) -> list[Path]:
    """Runs in this folder and in two levels below it, the one that was last written to first."""
    found: list[tuple[float, Path]] = []
    for depth in ("", "*/", "*/*/"):
        for path in here.glob(f"{depth}events.jsonl"):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path.parent))
    return [folder for _, folder in sorted(found, reverse=True)]


def is_job(word: str) -> bool:
    """It looks like the number of a job."""
    return _JOB_ID.fullmatch(word) is not None


def of_job(record: JobRecord) -> Path | None:
    """The run folder of a job, None for one that is not ours or has not begun."""
    script = Path(record.command)
    if script.name == "submission.sh" and script.parent.name == "call" and is_run(script.parent.parent):
        return script.parent.parent
    task = script.parent / f"task-{record.fields.get('ArrayTaskId', '')}"
    if script.name == "submission.sh" and is_run(task):
        return task
    named = _named_in(record.std_out)
    if named is not None and is_run(named):
        return named
    beside = Path(record.work_dir) / "resilience-runs" / f"job-{record.job_id}"
    return beside if record.work_dir and is_run(beside) else None


def is_of(record: JobRecord, folder: Path) -> bool:
    """The job works, or will work, on the run in this folder.  Tasks of an array that wait share one record."""
    script, found = Path(record.command), of_job(record)
    task = script.name == "submission.sh" and script.parent == folder.absolute().parent and folder.name.startswith("task-")
    return (found is not None and os.path.samefile(found, folder)) or (found is None and task and record.state.waiting)


def is_run(folder: Path) -> bool:
    """There is a run in it, be it only prepared."""
    return (folder / "run.json").is_file()


def _named_in(log: str) -> Path | None:
    """The folder that a supervisor named in the job's log; the newest one, where runs share a log."""
    try:
        with open(log, "rb") as file:
            head = file.read(_LOOK_BYTES)
        named = [(found.start(), found[1].decode(errors="surrogateescape")) for found in _FIRST_LINE.finditer(head)]
        named += [(found.start(), json.loads(found[1])) for found in _FIRST_OBJECT.finditer(head)]
    except (OSError, ValueError):
        return None
    return Path(max(named)[1]) if named else None
