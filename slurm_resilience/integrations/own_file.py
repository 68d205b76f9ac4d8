"""A script that knows nothing of us keeps one checkpoint file of its own, and never starts from scratch.

Run on every rank in front of the script: ``python -m slurm_resilience.integrations.own_file NAME RESUME python train.py …``.
The script reads and writes the file that ``RESILIENCE_CHECKPOINT_FILE`` names, and no word of it is changed.  That path is
of this attempt alone, so that what an older one still writes does no harm.  Whenever the script has finished writing, a
copy is committed among the run's checkpoints; each new attempt begins with the newest whole one.

What is not assumed: that the script writes in a safe way.  A file that was cut off in the middle of a save is never used.
What is: that rank 0 writes it, in its own process, and that it is one file.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurm_resilience.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "RESILIENCE_CHECKPOINT_FILE"
PLACEHOLDER = "{checkpoint}"
_MODULE = "slurm_resilience.integrations.own_file"


def command(argv: Sequence[str], name: str, resume_with: str = "") -> tuple[str, ...]:
    """The command that gives ``argv`` its file ``name``; ``resume_with`` is appended when there is something to go on from.

    ``{checkpoint}`` in either stands for the file's path.  Raises :class:`ConfigError` for a name that is none, and for what
    is no Python program.
    """
    from slurm_resilience.runtime.command import parse_python

    if not name or name in (".", "..") or name.startswith((".", "-")) or set(name) & set("/\n\0"):
        raise ConfigError(
            f"{name!r} cannot be the name of a checkpoint file",
            evidence="it is a name without a folder: where the file is, each attempt decides anew",
            remedy=f"write --checkpoint-file snapshot.pt, and let the script read its path from {VARIABLE}",
        )
    try:
        shlex.split(resume_with)
    except ValueError as error:
        raise ConfigError(f"The arguments {resume_with!r} cannot be split into words", evidence=str(error)) from None
    python = parse_python(argv)
    if python is None:
        raise ConfigError(
            "A checkpoint file is kept for Python programs only",
            evidence=f"{argv[0] if argv else ''!r} is none: who writes the file, and when it is whole, is seen from inside",
            remedy="give the command as `python train.py …`, without torchrun: the ranks are started here",
        )
    return (python.interpreter, *python.flags, "-m", _MODULE, name, resume_with, *argv)


def arguments(argv: Sequence[str], resume_with: str, path: str, *, resumes: bool) -> list[str]:
    """The script's command line, with the file's path in the place of ``{checkpoint}``."""
    words = [*argv, *(shlex.split(resume_with) if resumes else ())]
    return [word.replace(PLACEHOLDER, path) for word in words]


def main() -> None:
    """Give the script its file, become the script, and keep what it saves."""
    from slurm_resilience.integrations.file_keeper import FileKeeper
    from slurm_resilience.progress.contract import RankContract
    from slurm_resilience.runtime.command import parse_python
    from slurm_resilience.runtime.main_module import run

    name, resume_with, *argv = sys.argv[1:]
    contract = RankContract.from_environment()
    if contract is None:
        raise ConfigError("No agent has started this", remedy="slurm-resilience run --checkpoint-file NAME -- python train.py")
    keeper = FileKeeper(contract, name, rank=int(os.environ["RANK"]), world=int(os.environ["WORLD_SIZE"]))
    resumes = keeper.begin()
    os.environ[VARIABLE] = str(keeper.path)
    words = arguments(argv, resume_with, str(keeper.path), resumes=resumes)
    python = parse_python(words)
    assert python is not None, "command() has looked"
    if sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # it is there for our own sake; run() puts what is the script's
    try:
        run(python.form, python.target, python.args, words)
    finally:
        keeper.close()


def ready(path: Path) -> bool | None:
    """What rank 0 left beside the file: whether there is something to go on from; None while it is not there."""
    try:
        return bool(json.loads(path.read_text(encoding="ascii"))["resumes"])
    except (OSError, ValueError, KeyError):
        return None


if __name__ == "__main__":
    main()
