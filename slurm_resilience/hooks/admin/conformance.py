"""Machines and tools that are made up, so that checks, a site's own included, can be tested without the hardware.

A tool is a real program that says what it is told to; a machine is a folder with the /proc, /sys and /dev/kmsg of one.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.hooks import engine, world
from slurm_resilience.hooks.checks import Result


def tool(path: Path, says: str = "", *, code: int = 0, hangs: bool = False, floods_bytes: int = 0) -> Path:
    """A program that prints ``says`` and ends with ``code``, or hangs, or prints so many bytes first."""
    lines = ["#!/bin/sh"]
    if floods_bytes:
        lines.append(f"head -c {floods_bytes} /dev/zero | tr '\\0' x")
    lines.append(f"printf %s {shlex.quote(says)}")
    lines.append("exec sleep 3600" if hangs else f"exit {code}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def tool_by_argument(path: Path, answers: Mapping[str, tuple[str, int]]) -> Path:
    """A program that answers by the first of these words that is in its arguments."""
    cases = "".join(
        f"  *{shlex.quote(word)}*) printf %s {shlex.quote(says)}; exit {code} ;;\n" for word, (says, code) in answers.items()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}esac\nexit 64\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def machine(root: Path, files: Mapping[str, str | None]) -> Path:
    """A machine with these files; None makes one that hangs whoever waits for its text."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            os.mkfifo(path)
            os.open(path, os.O_RDWR)  # a writer that never writes, as long as we live
        else:
            path.write_text(text, encoding="utf-8")
    return root


def kernel_log(lines: Sequence[str], *, first: int = 100, facility: int = 0) -> str:
    """The text of /dev/kmsg with these messages.  Source: Documentation/ABI/testing/dev-kmsg."""
    return "".join(f"{facility * 8 + 6},{first + index},{1000 * index},-;{line}\n" for index, line in enumerate(lines))


@dataclass(frozen=True)
class Case:
    """What is asked of a check: its options, the machine, the job that ended."""

    options: Mapping[str, object]
    root: str = ""
    job: str = ""
    uid: int = -1
    command: str = ""
    timeout_s: float = 10.0


def answer(name: str, case: Case, state: Path) -> Result:
    """What the check says, run just as the hooks run it."""
    environ = {"SLURM_JOB_ID": case.job, "SLURM_JOB_UID": str(case.uid)} if case.job else {}
    here = world.World("test", "n1", {}, str(state), environ, 30.0)
    entry = {"mode": "drain", "timeout_s": case.timeout_s, "options": dict(case.options), "command": case.command}
    return engine.run(here, [engine.Plan(name, entry)], root=case.root)[0]
