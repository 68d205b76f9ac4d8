"""What is to be rehearsed, and can it be done here?  Everything that makes no sense is refused before anything starts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.errors import ConfigError, nearest
from slurm_resilience.integrations.own_file import PLACEHOLDER, VARIABLE

# fault -> what it is, in the words of the verdict
FAULTS = {
    "kill-rank": "a rank is killed (SIGKILL)",
    "hang-rank": "a rank stands still (SIGSTOP)",
    "kill-agent": "an agent is killed",
    "kill-supervisor": "the supervisor is killed",
    "power-off": "a node loses power, silently",
    "preempt": "another job takes the nodes",
    "time-limit": "the time limit comes",
}
LOCALLY = ("kill-rank", "hang-rank")  # what an ordinary user can do to processes of his own


@dataclass(frozen=True)
class Wish:
    """One rehearsal.  ``nodes`` is FEWEST-MOST; ``within_s``: longest wait for each thing that has to happen.

    ``checkpoint_file`` is that of a script without a ``Run``; ``options`` are further ones of ``slurm-resilience run``.
    """

    script: Path
    args: tuple[str, ...]
    faults: tuple[str, ...]
    nodes: str = "1-2"
    ranks_per_node: int = 1
    checkpoint_file: str = ""
    resume_with: str = ""
    options: str = ""
    within_s: float = 300.0

    @property
    def is_python(self) -> bool:
        """A Python program, which gets a batch script; else it is one itself."""
        return self.script.suffix == ".py"

    @property
    def never_told_its_file(self) -> bool:
        """Nothing that can be seen from here tells the script where its checkpoint file is; a module of it still may."""
        if not self.checkpoint_file or any(PLACEHOLDER in word for word in (*self.args, self.resume_with)):
            return False
        return VARIABLE not in self.script.read_text(encoding="utf-8", errors="replace")

    @property
    def most_nodes(self) -> int:
        return int(self.nodes.rpartition("-")[2])


def faults_of(text: str) -> tuple[str, ...]:
    """The faults in a list with commas, in its order.  Raises :class:`ConfigError` for one that is unknown, and for none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("No fault is asked for", remedy=f"--faults {','.join(FAULTS)}")
    for name in names:
        if name not in FAULTS:
            raise ConfigError(f"There is no fault {name!r} to rehearse: {nearest(name, FAULTS)}")
    return tuple(names)


def words_of(text: str) -> tuple[str, ...]:
    """The words of a shell line.  Raises :class:`ConfigError` when it is none."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{text!r} cannot be split into words", evidence=str(error)) from None


def check(wish: Wish, *, local: bool) -> None:
    """Raises :class:`ConfigError` for what cannot be rehearsed."""
    if not wish.script.is_file():
        raise ConfigError(f"There is no script {str(wish.script)!r}", evidence="it is not there, or no file")
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", wish.nodes)
    if found is None or int(found[1]) > int(found[2] or found[1]):
        raise ConfigError(f"--nodes {wish.nodes!r} is neither N nor FEWEST-MOST")
    if not wish.is_python:
        if local:
            raise ConfigError("A batch script is rehearsed in the sandbox only", remedy="give the Python script, or be root")
        if "#SBATCH" not in wish.script.read_text(encoding="utf-8", errors="replace"):
            raise ConfigError(
                f"{wish.script} is neither a Python script nor a batch script",
                evidence="its name does not end with .py, and it has no #SBATCH line",
            )
        for value, option in (
            (wish.args, "--args"),
            (wish.checkpoint_file, "--checkpoint-file"),
            (wish.options, "--options"),
        ):
            if value:
                raise ConfigError(f"A batch script says itself how it is run: {option} cannot be given with one")
    if local and (beyond := [name for name in wish.faults if name not in LOCALLY]):
        raise ConfigError(
            f"Without the sandbox nobody can rehearse {', '.join(beyond)}",
            evidence=f"on this machine alone: {', '.join(LOCALLY)}",
            remedy="run it as root: the sandbox is a real Slurm on this machine",
        )


def words(wish: Wish, python: str) -> Sequence[str]:
    """The training command of a Python script."""
    return (python, str(wish.script), *wish.args)
