"""Why: one page for each incident of a run, or for one node or checkpoint of it.

    slurm-resilience explain RUN                 cause, rank, node, first exception, times, decisions, what came next
    slurm-resilience explain RUN NODE            why this node is out, or in
    slurm-resilience explain RUN CHECKPOINT      why this one (a name, the beginning of one, or a step) was skipped, or taken

RUN is a run folder or a job id; NODE or CHECKPOINT alone is looked for in the runs below this folder, and a checkpoint's own
folder names its run.  Only records are read: the run may be over, or on another machine.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_resilience.cli import which_run
from slurm_resilience.errors import ConfigError, ExitCode, nearest

if TYPE_CHECKING:
    from slurm_resilience.observe.subject import Subject

_COLUMNS = 118


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", metavar="RUN", help="a run folder or a job id; or a node or checkpoint of a run below here")
    parser.add_argument("subject", nargs="?", metavar="NODE|CHECKPOINT", help="one node or checkpoint of that run")
    parser.add_argument("--incident", type=int, metavar="N", help="only the Nth one, counted from 1; -1 is the last")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def execute(args: argparse.Namespace) -> int:
    """Print them."""
    folder, word = _meant(args.run, args.subject)
    if word is None:
        return _incidents(folder, args)
    if args.incident is not None:
        raise ConfigError("--incident is about a run", remedy=f"leave it out, or leave {word} out")
    found = _subject(folder, word)
    if args.json:
        from slurm_resilience.observe.json_text import dumps

        print(dumps({"run_dir": str(folder), **found.as_dict()}))
    else:
        print(found.page(columns=_columns()))
    return int(ExitCode.OK)


def _columns() -> int:
    return shutil.get_terminal_size((_COLUMNS, 24)).columns


def _meant(run: str, subject: str | None) -> tuple[Path, str | None]:
    """The run folder and the subject.  Raises :class:`ConfigError` for a word that is neither a run nor in one."""
    from slurm_resilience.observe.events import FILE_NAME

    path = Path(run)
    if subject is None and path.is_dir() and not (path / FILE_NAME).exists():
        above = path.absolute().parent
        for folder in (above.parent, above):
            if (folder / FILE_NAME).exists():
                return folder, path.absolute().name
    if subject is None and not path.exists() and not which_run.is_job(run):
        for folder in which_run.below(Path.cwd()):
            if _about(folder, run) is not None:
                return folder, run
        raise ConfigError(
            f"{run} is neither a run nor a node or checkpoint of one",
            evidence="it is no folder, no number of a job, and no run below this folder names it",
            remedy="write `slurm-resilience explain RUN_DIR` and the node or checkpoint after it",
        )
    folder, _ = which_run.find(run)
    if not (folder / FILE_NAME).exists():
        raise ConfigError(
            f"There is nothing to explain in {folder}",
            evidence=f"{folder / FILE_NAME} does not exist",
            remedy="give the folder that `slurm-resilience run` names in its first line, once the run has begun",
        )
    return folder, subject


def _about(folder: Path, word: str) -> Subject | None:
    from slurm_resilience.observe import subject
    from slurm_resilience.observe.events import read_for_standing

    return subject.node(read_for_standing(folder), word) or subject.checkpoint(read_for_standing(folder), word)


def _subject(folder: Path, word: str) -> Subject:
    from slurm_resilience.observe.events import read_for_standing
    from slurm_resilience.observe.subject import known

    found = _about(folder, word)
    if found is None:
        if word.lstrip("-").isdigit():
            raise ConfigError(
                f"The run in {folder} has no checkpoint of step {word}, and no node of that name",
                evidence="a number after RUN is the step of a checkpoint",
                remedy=f"for the incident of that number: slurm-resilience explain {folder} --incident {word}",
            )
        nodes, checkpoints = known(read_for_standing(folder))
        raise ConfigError(
            f"The run in {folder} names no node and no checkpoint {word!r}",
            evidence=f"its nodes are {' '.join(nodes[:16]) or 'not known yet'}; it has saved {len(checkpoints)} checkpoints",
            remedy=nearest(word, [*nodes, *checkpoints[-16:]]) if nodes else "wait until it has begun",
        )
    if found.kind == "checkpoint":
        _ask_the_root(folder, found)
    return found


def _ask_the_root(folder: Path, found: Subject) -> None:
    """What the checkpoint's own folder says: it may have been marked or removed by others than this run."""
    from slurm_resilience._atomic import read_json
    from slurm_resilience.checkpoint.store import CheckpointStore

    run = read_json(folder / "run.json")
    config = run.get("config") if isinstance(run, dict) else None
    root = Path((config or {}).get("checkpoint", {}).get("dir") or folder / "checkpoints")
    if not root.is_dir():
        return
    store = CheckpointStore.open(root)
    entry = next((entry for entry in store.entries() if entry.name == found.name), None)
    if entry is None:
        gone = "It is no longer in the checkpoint root: retention, or somebody, has removed it."
        found.verdict += f" {gone}" if found.name.startswith("step-") else ""
        return
    state = f" It is {entry.state}{f' by {entry.by}' if entry.by else ''}{f': {entry.reason}' if entry.reason else ''}."
    tried = f" {entry.attempts} loads of it were begun and not brought to an end." if entry.attempts else ""
    odd = f" When it was saved: {entry.alarm}." if entry.alarm else ""
    found.verdict += state + tried + odd + (" It is pinned." if entry.pinned else "")


def _incidents(folder: Path, args: argparse.Namespace) -> int:
    from slurm_resilience.observe.explain import explain
    from slurm_resilience.observe.explain_page import page
    from slurm_resilience.observe.incidents import numbered
    from slurm_resilience.observe.json_text import dumps

    told = explain(folder)
    found = [(number, one) for (number, _), one in zip(numbered(one.incident for one in told), told, strict=True)]
    count = sum(number is not None for number, _ in found)
    if args.incident is not None:
        wanted = args.incident if args.incident > 0 else count + 1 + args.incident
        found = [each for each in found if each[0] == wanted]
        if not found:
            raise ConfigError(
                f"There is no incident {args.incident} in {folder}",
                evidence=f"there are {count}",
                remedy="leave --incident out to see all of them",
            )
    if args.json:
        print(dumps({"run_dir": str(folder), "incidents": [{"number": number, **one.as_dict()} for number, one in found]}))
    elif not found:
        print("no incidents")
    else:
        print("\n\n".join(page(one, number=number, of=count, columns=_columns()) for number, one in found))
    return int(ExitCode.OK)
