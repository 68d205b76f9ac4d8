"""Where does the command of the user's begin?  After ``--``; without it, only a command that has no options of its own."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Sequence


def misplaced(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Why these words cannot be told apart into our options and the command's, and how to write them; "" when they can.

    argparse would take an option of ours for its own wherever it stands, so that `--global-batch 64` of a script would
    never reach the script.
    """
    before = _before_command(parser, words)
    if before is None:
        return ""
    at, left = 0, before
    options = {text: action for action in parser._actions for text in action.option_strings}  # no public way to ask
    while at < len(words) and words[at] != "--":
        word = words[at]
        if not _is_option(word):
            if left == 0:
                return _said(parser.prog, words, at)
            left -= 1
            at += 1
            continue
        action = options.get(word.partition("=")[0]) or options.get(word[:2])
        if action is None:
            return ""  # unknown, and before the command: argparse says so
        joined = "=" in word if word.startswith("--") else len(word) > 2
        after = words[at + 1] if at + 1 < len(words) else "--"
        takes = not joined and after != "--" and (action.nargs is None or (action.nargs == "?" and not _is_option(after)))
        if takes and action.nargs == "?" and "--" not in words and shutil.which(after):
            ours, command = [*parser.prog.split(), *words[: at + 1]], words[at + 1 :]
            return f"{word!r} would take {after!r} as its value: {_written(ours, command)}"
        at += 2 if takes else 1
    return ""


def _before_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> int | None:
    """How many words that are no options stand before the command; None where there is no command."""
    if any(action.dest == "argv" for action in parser._actions):
        return 0
    if parser.prog.endswith(" checkpoints verify") and "--deep" in words:
        return 1
    return None


def _said(prog: str, words: Sequence[str], at: int) -> str:
    rest = list(words[at + 1 :])
    until = rest.index("--") if "--" in rest else len(rest)
    found = next((word for word in rest[:until] if _is_option(word)), None)
    if found is None:
        return ""
    said = _written([*prog.split(), *words[:at]], [words[at], *rest[:until], *rest[until + 1 :]])
    return f"{found!r} stands after the command {words[at]!r}, so it may be the command's or ours: {said}"


def _written(ours: Sequence[str], command: Sequence[str]) -> str:
    return f"put `--` before the command: `{shlex.join(ours)} -- {shlex.join(command)}`"


def _is_option(word: str) -> bool:
    return len(word) > 1 and word.startswith("-")
