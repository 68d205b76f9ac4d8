"""One job, node or partition as ``scontrol -o show`` describes it: text in, typed values out.

Fields that we do not know are kept as text.  A job name or comment that holds spaces, ``=`` or words such as
``JobState=COMPLETED`` does not confuse the rest.
"""

from __future__ import annotations

import calendar
import re
import time
from dataclasses import dataclass, field
from typing import Any

from slurm_resilience.slurm.nodeset import expand
from slurm_resilience.slurm.states import JobState, parse_state

_BOUNDARY = re.compile(r" (?=[A-Za-z][A-Za-z0-9:/_.\[\]-]*=)")

# Fields whose value a person chose: it may hold anything.  After them only a field that Slurm has can begin.
_FREE_TEXT_FIELDS = """
    JobName Comment AdminComment SystemComment Command WorkDir StdErr StdIn StdOut SubmitLine Reason OS Extra Licenses
    MailUser Account WCKey Dependency
"""
_FIELDS_AFTER_FREE_TEXT = """
    UserId GroupId MCS_label Priority Nice Account QOS WCKey JobState Reason Dependency FailedNode Requeue Restarts BatchFlag
    Reboot ExitCode DerivedExitCode RunTime SubmitTime Licenses LicensesAlloc Network Command WorkDir AdminComment SystemComment
    Comment StdErr StdIn StdOut Power SubmitLine TresPerJob TresPerNode TresPerSocket TresPerTask TresBind TresFreq CpusPerTres
    MemPerTres MailUser MailType KillOInInvalidDependent KillOnInvalidDependent SELinuxContext NtasksPerTRES Container
    ContainerID BurstBuffer Extra Features DelayBoot Cluster OOMKillStep Partition ExtSensorsJoules RealMemory CapWatts Gres
    BootTime LastBusyTime
"""
_FREE_TEXT, _FOLLOWS_FREE_TEXT = frozenset(_FREE_TEXT_FIELDS.split()), frozenset(_FIELDS_AFTER_FREE_TEXT.split())
# Slurm prints the name second; what follows it is always this.  Source: slurm_sprint_job_info() of 22.05 to 25.05.
_NAME = re.compile(r"JobName=(?P<name>.*?) (?=UserId=[^ (]+\(\d+\) GroupId=)")


def parse_fields(line: str) -> dict[str, str]:
    """The fields of one ``scontrol -o`` line.

    After a free text only a field that Slurm has, and that was not there before, begins; so a comment with
    ``Restarts=7`` in it stays a comment.
    """
    fields: dict[str, str] = {}
    name = _NAME.search(line)
    if name is not None:
        line = line[: name.start()] + line[name.end() :].lstrip()
    key, value = "", ""
    for piece in _BOUNDARY.split(line.strip()):
        next_key, equals, next_value = piece.partition("=")
        if not equals or (key in _FREE_TEXT and (next_key not in _FOLLOWS_FREE_TEXT or next_key in fields)):
            value += f" {piece}"
            continue
        if key:
            fields.setdefault(key, value.rstrip())
        key, value = next_key, next_value
    if key:
        fields.setdefault(key, value.rstrip())
    if name is not None:
        fields["JobName"] = name["name"]
    return fields


def parse_time(text: str | None) -> float | None:
    """Wall-clock seconds of ``2026-11-30T01:02:03`` (UTC, as :mod:`child` asks for); None for Unknown, None, N/A."""
    try:
        return float(calendar.timegm(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


def parse_duration(text: str | None) -> float | None:
    """Seconds of ``[days-]hours:minutes:seconds``, ``minutes:seconds`` or ``minutes``; None for UNLIMITED and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", (text or "").strip())
    if not found:
        return None
    days, first, second, third = found.groups()
    if days is not None:
        return int(days) * 86400.0 + int(first) * 3600 + int(second or 0) * 60 + int(third or 0)
    if third is not None:
        return int(first) * 3600.0 + int(second) * 60 + int(third)
    return int(first) * 60.0 + int(second or 0)


def _range(text: str | None) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", (text or "").strip())
    return (int(found[1]), int(found[2] or found[1])) if found else (0, 0)


def _int(text: str | None) -> int:
    return int(text) if text and text.lstrip("-").isdigit() else 0


def _text(text: str | None) -> str:
    return "" if text in (None, "(null)", "None", "N/A") else str(text)


@dataclass(frozen=True)
class JobRecord:
    """A job as the controller knows it now.  Times are wall-clock seconds; ``num_nodes`` is (fewest, most).

    ``nodes`` are the nodes that it holds, ``excluded`` and ``required`` what it asks for.  ``job_id`` is ``ARRAY_TASK``
    for one task of an array, so it can be given to any command.
    """

    job_id: str
    raw_job_id: str
    name: str
    user: str
    state: JobState
    reason: str
    restarts: int
    requeue: bool
    exit_code: int
    exit_signal: int
    nodes: tuple[str, ...]
    batch_host: str
    num_nodes: tuple[int, int]
    num_tasks: int
    excluded: tuple[str, ...]
    required: tuple[str, ...]
    failed_node: str
    partition: str
    qos: str
    priority: int
    time_limit_s: float | None
    submit_at: float | None
    eligible_at: float | None
    start_at: float | None
    end_at: float | None
    preempt_at: float | None
    comment: str
    work_dir: str
    command: str
    std_out: str
    fields: dict[str, str] = field(repr=False, default_factory=dict, compare=False)

    @property
    def requeued(self) -> bool:
        """The controller has put this run's successor into the queue, though nodes may still be completing.

        While COMPLETING the state word hides what is beneath it.  A requeued job then shows the end it would have if it
        started now, start + time limit to the second; one that is over shows when it ended.  Compared with each other,
        since clocks of nodes differ.  Source: seen on 22.05.8 for scancel, preemption and requeue.
        """
        if self.state is not JobState.COMPLETING:
            return self.state.waiting
        if self.end_at is None or self.start_at is None:
            return True
        if self.time_limit_s is None or self.reason == "TimeLimit":
            return False
        return abs(self.end_at - self.start_at - self.time_limit_s) < 1.0

    @property
    def held(self) -> bool:
        """In the queue with priority 0: it will not start until somebody releases it."""
        return self.state.waiting and (self.priority == 0 or "held" in self.reason.lower())

    @classmethod
    def parse(cls, line: str) -> JobRecord:
        """From one line of ``scontrol -o show job``.  Raises ValueError when there is no job in it."""
        f = parse_fields(line)
        if "JobId" not in f or "JobState" not in f:
            raise ValueError(f"no job in {line[:200]!r}")
        array, task = f.get("ArrayJobId"), f.get("ArrayTaskId", "")
        code, _, signal = f.get("ExitCode", "0:0").partition(":")
        return cls(
            job_id=f"{array}_{task}" if array and task.isdigit() else f["JobId"],
            raw_job_id=f["JobId"],
            name=f.get("JobName", ""),
            user=f.get("UserId", "").partition("(")[0],
            state=parse_state(f["JobState"]),
            reason=_text(f.get("Reason")),
            restarts=_int(f.get("Restarts")),
            requeue=f.get("Requeue") == "1",
            exit_code=_int(code),
            exit_signal=_int(signal),
            nodes=expand(f.get("NodeList", "")),
            batch_host=_text(f.get("BatchHost")),
            num_nodes=_range(f.get("NumNodes")),
            num_tasks=_int(f.get("NumTasks")),
            excluded=expand(f.get("ExcNodeList", "")),
            required=expand(f.get("ReqNodeList", "")),
            failed_node=_text(f.get("FailedNode")),
            partition=f.get("Partition", ""),
            qos=_text(f.get("QOS")),
            priority=_int(f.get("Priority")),
            time_limit_s=parse_duration(f.get("TimeLimit")),
            submit_at=parse_time(f.get("SubmitTime")),
            eligible_at=parse_time(f.get("EligibleTime")),
            start_at=parse_time(f.get("StartTime")),
            end_at=parse_time(f.get("EndTime")),
            preempt_at=parse_time(f.get("PreemptTime")),
            comment=_text(f.get("Comment")),
            work_dir=f.get("WorkDir", ""),
            command=_text(f.get("Command")),
            std_out=f.get("StdOut", ""),
            fields=f,
        )


@dataclass(frozen=True)
class NodeRecord:
    """A node as the controller knows it.  ``flags`` are the words after the base state: DRAIN, NOT_RESPONDING, …"""

    name: str
    base: str
    flags: frozenset[str]
    reason: str
    boot_at: float | None
    fields: dict[str, str] = field(repr=False, default_factory=dict, compare=False)

    @property
    def lost(self) -> bool:
        """Down, not answering or powered off: whatever ran there does not any more, or nobody can tell."""
        return self.base in ("DOWN", "UNKNOWN") or bool(
            self.flags & {"NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "FAIL"}
        )

    @property
    def drained(self) -> bool:
        """Somebody wants it empty: no new job starts there, one that runs there goes on."""
        return bool(self.flags & {"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING"})

    @property
    def usable(self) -> bool:
        """Slurm would start a job there, now or when it is free."""
        return not self.lost and not self.flags & {"DRAIN", "MAINTENANCE", "RESERVED", "PLANNED_DOWN", "REBOOT_REQUESTED"}

    @classmethod
    def parse(cls, line: str) -> NodeRecord:
        """From one line of ``scontrol -o show node``.  Raises ValueError when there is no node in it."""
        f = parse_fields(line)
        if "NodeName" not in f or "State" not in f:
            raise ValueError(f"no node in {line[:200]!r}")
        # IDLE+DRAIN, DOWN*, IDLE*+DRAIN: the star means "does not respond".  Source: node_state_string_complete()
        words = f["State"].upper().split("+")
        flags = {word.rstrip("*~#!%$@^-") for word in words[1:]}
        if "*" in f["State"]:
            flags.add("NOT_RESPONDING")
        return cls(
            f["NodeName"],
            words[0].rstrip("*~#!%$@^-"),
            frozenset(flags),
            _text(f.get("Reason")),
            parse_time(f.get("BootTime")),
            f,
        )


def parse_config(text: str) -> dict[str, str]:
    """``scontrol show config`` as a mapping; Slurm's ``(null)`` becomes ""."""
    out: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip() and " " not in key.strip():
            out.setdefault(key.strip(), _text(value.strip()))
    return out


def parse_sacct(text: str, columns: list[str]) -> list[dict[str, Any]]:
    """``sacct -P -n`` lines, in sacct's order, steps left out."""
    rows = []
    for line in text.splitlines():
        values = line.split("|")
        if len(values) < len(columns) or "." in values[0]:
            continue
        rows.append(dict(zip(columns, values, strict=False)))
    return rows
