"""What does a batch script lack to survive?  Reads its #SBATCH lines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from slurm_resilience.doctor.findings import Finding
from slurm_resilience.errors import ConfigError

_LINE = re.compile(r"^#SBATCH\s+(.*)$")
_SHORT = {"-N": "nodes", "-n": "ntasks", "-o": "output", "-e": "error", "-t": "time", "-p": "partition", "-J": "job-name"}


def options(text: str) -> dict[str, str]:
    """The options of a script as sbatch reads them: up to the first line that is neither a comment nor empty."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            if line.strip() and not line.lstrip().startswith("#"):
                break
            continue
        words = shlex.split(match[1], comments=True)
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                name = name[2:]
                if not equals and words and not words[0].startswith("-"):
                    value = words.pop(0)
            else:
                name, value = _SHORT.get(word[:2], word[:2]), word[2:] or (words.pop(0) if words else "")
            found[name] = value
    return found


def lead_s(given: dict[str, str]) -> int | None:
    """The seconds of ``--signal=USR2@90``; None without one."""
    match = re.search(r"@(\d+)", given.get("signal", ""))
    return int(match[1]) if match else (60 if "signal" in given else None)


def read(path: Path) -> dict[str, str]:
    """The options of a script in a file.  Raises :class:`ConfigError` when it cannot be read."""
    try:
        return options(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(f"The script {path} cannot be read", evidence=str(error)) from error


def of_options(given: dict[str, str], name: str) -> list[Finding]:
    """Findings about a script's options.  Pure."""
    out = []
    if "requeue" not in given:
        out.append(
            Finding(
                "script-no-requeue",
                "danger",
                "The script does not say that it may be requeued",
                f"{name} has no #SBATCH --requeue" + (", but --no-requeue" if "no-requeue" in given else ""),
                "add #SBATCH --requeue",
            )
        )
    if given.get("open-mode") != "append":
        out.append(
            Finding(
                "script-truncates-log",
                "warning",
                "A requeued job truncates its log: what ended it cannot be read any more",
                f"{name} has no #SBATCH --open-mode=append",
                "add #SBATCH --open-mode=append",
            )
        )
    if "no-kill" not in given and "k" not in given:
        out.append(
            Finding(
                "script-dies-with-a-node",
                "danger",
                "Slurm ends the whole job when one of its nodes dies",
                f"{name} has no #SBATCH --no-kill",
                "add #SBATCH --no-kill: the run goes on on the other nodes",
            )
        )
    if lead_s(given) is None:
        out.append(
            Finding(
                "script-no-warning",
                "danger",
                "Nobody warns the job before its time limit: what was done since the last checkpoint is lost",
                f"{name} has no #SBATCH --signal",
                "add #SBATCH --signal=USR2@90",
            )
        )
    elif given["signal"].upper().startswith("B:"):
        out.append(
            Finding(
                "script-warns-the-shell",
                "warning",
                "Only the batch shell is warned before the time limit, not the agents",
                f"--signal={given['signal']}",
                "write it without B:, the agents handle it",
            )
        )
    if "-" in given.get("nodes", "") and ("ntasks" in given or "ntasks-per-node" in given):
        out.append(
            Finding(
                "script-fixes-tasks",
                "warning",
                "With a number of tasks Slurm gives the fewest nodes of the range, and keeps a stale number after a requeue",
                f"--nodes={given['nodes']} together with --ntasks",
                "leave --ntasks and --ntasks-per-node out; --exclusive or GPUs per node say what is needed",
            )
        )
    return out
