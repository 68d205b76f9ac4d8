"""Drain reasons that say whose they are in their first 20 characters, with nothing in them that a parser or shell trips over.

sr:gpu-recovery g3 j123 t=1796001234.567 b=1a2b3c4d node: GPU 3 asks for a reboot
"""

import re

PREFIX = "sr:"
LONGEST = 120
# What this project called its checks before: reasons written by an older release are still ours.
RENAMED = {"gpu-count": "gpu", "fs": "filesystem", "disk": "filesystem", "procs": "leftovers", "mce": "memory_errors"}

_OURS = re.compile(r"sr:([a-z0-9_]+)(?:-([a-z0-9_-]+))?(?: |$)")
_AT = re.compile(r" t=(\d+(?:\.\d+)?)(?: |$)")
_BOOT = re.compile(r" b=([0-9a-f]{1,8})(?: |$)")
_JOB = re.compile(r" j(\d+)(?: |$)")
_NOTE = re.compile(r"\{sr:(flag|back|hold) ([a-z0-9_-]+) (\d+)(?: ([^{}]*))?\}")


def clean(text: str, longest: int = LONGEST) -> str:
    """Printable ASCII on one line, without quotes, backslashes, brackets, braces, dollars and backticks."""
    kept = [char if " " <= char <= "~" and char not in "\"'\\`$[]{}|;&<>" else " " for char in text]
    return " ".join("".join(kept).split())[:longest].rstrip()


def compose(check: str, word: str, where: str, job: str, at: float, boot: str, text: str) -> str:
    """The reason for one drain; ``at`` makes it unlike any other that this node ever writes."""
    head = PREFIX + check + ("-" + word if word else "")
    parts = [head, where, "j" + job if job else "", f"t={at:.3f}", "b=" + boot[:8] if boot else "", text]
    return clean(" ".join(part for part in parts if part))


class Ours:
    """What one of our reasons says."""

    def __init__(self, check: str, word: str, at: float, boot: str, job: str) -> None:
        self.check = check
        self.word = word
        self.at = at
        self.boot = boot
        self.job = job


def parse(reason: str) -> "Ours | None":
    """What our reason says; None for a foreign one.  Only the whole prefix counts, never a part in the middle."""
    found = _OURS.match(reason)
    if not found:
        return None
    at, boot, job = _AT.search(reason), _BOOT.search(reason), _JOB.search(reason)
    check = found.group(1)
    return Ours(
        RENAMED.get(check, check), found.group(2) or "", float(at.group(1)) if at else 0.0,
        boot.group(1) if boot else "", job.group(1) if job else "",
    )  # fmt: skip


class Note:
    """One of our marks in a node's comment: flag, back (from a drain) or hold."""

    def __init__(self, kind: str, what: str, at: int, text: str) -> None:
        self.kind = kind
        self.what = what
        self.at = at
        self.text = text


def notes(comment: str) -> "list[Note]":
    """Our marks in a comment."""
    return [Note(kind, what, int(at), text) for kind, what, at, text in _NOTE.findall(comment)]


def with_note(comment: str, kind: str, what: str, at: float, text: str = "") -> str:
    """The comment with this mark in place of an older one of its kind and subject; all other text stays."""
    bare = without_note(comment, kind, what)
    said = clean(text, 60)
    return "{} {{sr:{} {} {}{}}}".format(bare, kind, what, int(at), " " + said if said else "").strip()


def without_note(comment: str, kind: str, what: str = "") -> str:
    """The comment without our marks of this kind (and subject)."""

    def gone(match: "re.Match[str]") -> str:
        return "" if match.group(1) == kind and what in ("", match.group(2)) else match.group(0)

    return " ".join(_NOTE.sub(gone, comment).split())
