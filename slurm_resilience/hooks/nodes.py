"""What does Slurm say about its nodes?  ``scontrol -o show node`` as values; text that we do not understand is an error."""

import re

from . import reason as reasons

# Slurm has plans of its own with a node in these states; a drain would cancel, lose or kill something.
# Source: node_mgr.c of 22.05 (UPDATE NODE on REBOOT_*, DRAIN on POWERED_DOWN/POWERING_UP), slurm.conf(5)
LEAVE_ALONE = frozenset(
    ["REBOOT_REQUESTED", "REBOOT_ISSUED", "REBOOT", "POWERING_UP", "POWER_UP", "POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN",
     "PLANNED", "FUTURE", "DYNAMIC_FUTURE", "BLOCKED"]
)  # fmt: skip
OUT = frozenset(["DRAIN", "DOWN", "FAIL", "ERROR", "NOT_RESPONDING", "INVALID_REG", "UNKNOWN"])
_REASON = re.compile(r" Reason=(.*?) \[([^@\]\s]+)@([^\]\s]+)\](?= (?:Comment|Extra|ResumeAfterTime|InstanceId)=|$)")
_COMMENT = re.compile(r" Comment=(.*?)(?= Extra=| InstanceId=|$)")
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)\Z")
_WORD = re.compile(r" (State|Partitions|Gres|CPUTot|RealMemory|BootTime)=(\S*)")


class Node:
    """One node as slurmctld sees it."""

    def __init__(self, name: str, state: str, partitions: str, reason: str, user: str, since: float, comment: str) -> None:
        self.name = name
        self.state = state
        words = [word.rstrip("*$@^~#!%-") for word in state.split("+")]
        self.flags = frozenset(word for word in words if word)
        self.partitions = [name for name in partitions.split(",") if name and name != "(null)"]
        self.reason = reason
        self.user = user
        self.since = since
        self.comment = comment
        self.notes = reasons.notes(comment)
        self.ours = reasons.parse(reason)

    @property
    def drained(self) -> bool:
        return "DRAIN" in self.flags or "DRAINED" in self.flags or "DRAINING" in self.flags

    @property
    def out(self) -> bool:
        """Users cannot count on it."""
        return self.drained or bool(self.flags & OUT)

    @property
    def untouchable(self) -> "list[str]":
        return sorted(self.flags & LEAVE_ALONE)

    @property
    def held(self) -> bool:
        return any(note.kind == "hold" for note in self.notes)


def parse(text: str) -> "list[Node]":
    """The nodes in the answer.  Raises ValueError for an answer in a form that we do not know."""
    lines = []  # type: list[str]
    for line in text.splitlines():
        if line.startswith("NodeName="):
            lines.append(line)
        elif lines and line.strip():
            lines[-1] += " " + line.strip()  # a reason or comment with a newline in it
    found = []
    for line in lines:
        line = line.rstrip()
        name = line.split("=", 1)[1].split(" ", 1)[0]
        words = dict(reversed(_WORD.findall(line)))  # the first of each wins
        if "State" not in words:
            raise ValueError(f"no State= in {line[:200]!r}")
        why, comment = _REASON.search(line), None
        rest = line[why.end() :] if why else line
        comment = _COMMENT.search(rest)
        found.append(
            Node(
                name, words["State"], words.get("Partitions", ""), why.group(1) if why else "", why.group(2) if why else "",
                seconds(why.group(3)) if why else 0.0, comment.group(1) if comment else "",
            )
        )  # fmt: skip
    if not found:
        raise ValueError(f"no node in {text[:200]!r}")
    return found


def seconds(text: str) -> float:
    """Slurm's time (we always ask in UTC) as seconds since the epoch; 0 for what is none."""
    found = _TIME.match(text)
    if not found:
        return 0.0
    year, month, day, hour, minute, second = [int(part) for part in found.groups()]
    # Days since 1970 by the proleptic Gregorian calendar; the calendar module costs 5 ms to import
    year, month = (year - 1, month + 12) if month <= 2 else (year, month)
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * (month - 3) + 2) // 5 + day - 719469
    return float(days * 86400 + hour * 3600 + minute * 60 + second)
