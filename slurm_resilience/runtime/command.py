"""Is the user's command a Python program, and if so: which interpreter, which of its flags, and what does it run?

A Python program can be forked from a warm launcher that was started by the same interpreter with the same flags.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?([a-z]*)")
_PLAIN_FLAGS = frozenset("bBdEIOPqRsSuv")
_FLAGS_WITH_VALUE = frozenset("WX")


@dataclass(frozen=True)
class PythonCommand:
    """``interpreter flags target args``: ``form`` is "script", "module" (``-m``) or "code" (``-c``)."""

    interpreter: str
    flags: tuple[str, ...]
    form: str
    target: str
    args: tuple[str, ...]


def parse_python(argv: Sequence[str]) -> PythonCommand | None:
    """The parts of a Python command line; None when it is no Python, or one that reads a terminal or only prints.

    Source: CPython's command line, https://docs.python.org/3/using/cmdline.html.
    """
    if not argv or not _PYTHON.fullmatch(os.path.basename(argv[0])):
        return None
    flags: list[str] = []
    words = list(argv[1:])
    while words:
        word = words.pop(0)
        if word == "--" or not word.startswith("-"):
            target = words.pop(0) if word == "--" and words else word
            return None if target == "--" else PythonCommand(argv[0], tuple(flags), "script", target, tuple(words))
        if word == "-" or (word.startswith("--") and word != "--check-hash-based-pycs"):
            return None
        if word == "--check-hash-based-pycs":
            flags += [word, *words[:1]]
            del words[:1]
            continue
        plain = ""
        for position, letter in enumerate(word[1:], start=1):
            if letter in _PLAIN_FLAGS:
                plain += letter
                continue
            rest = word[position + 1 :]
            if letter not in "cmWX" or (not rest and not words):
                return None
            value = rest or words.pop(0)
            if plain:
                flags.append(f"-{plain}")
                plain = ""
            if letter in _FLAGS_WITH_VALUE:
                flags += [f"-{letter}", value]
                break
            return PythonCommand(argv[0], tuple(flags), "module" if letter == "m" else "code", value, tuple(words))
        if plain:
            flags.append(f"-{plain}")
    return None


def same_interpreter(one: PythonCommand | None, other: PythonCommand | None) -> bool:
    """Whether both run in the same interpreter with the same flags: what was started for one can be forked for the other."""
    return one is not None and other is not None and (one.interpreter, one.flags) == (other.interpreter, other.flags)


def launcher_command(
    argv: Sequence[str], *, wrap: Sequence[str], warm: bool, environment: Mapping[str, str]
) -> tuple[list[str] | None, str]:
    """What starts an interpreter that can be forked for this command; None with the reason where ranks start cold."""
    python = parse_python(argv)
    if not warm:
        return None, "warm = false in the configuration"
    if python is None:
        return None, f"{argv[0] if argv else ''!r} is not a Python command that can be forked"
    interpreter = python.interpreter if wrap else find_program(python.interpreter, environment)
    if interpreter is None:
        return None, f"there is no {python.interpreter!r} on the agent's PATH"
    return [*wrap, interpreter, *python.flags], ""


def find_program(name: str, environment: Mapping[str, str]) -> str | None:
    """The program's path by the PATH of that environment, as exec would find it; None when there is none."""
    return shutil.which(name, path=environment.get("PATH", os.defpath))
