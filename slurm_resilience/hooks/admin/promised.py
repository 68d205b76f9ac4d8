"""What slurm.conf promises of each node: CPUs and memory, as rules for the checks that compare them with the machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slurm_resilience.hooks import engine

USUAL = Path("/etc/slurm/slurm.conf")
_MOST_INCLUDES = 20


def promises(conf: Path) -> dict[str, Any]:
    """The rules, with the file and a checksum; {} where the file cannot be read or promises nothing.

    A node whose slurm.conf says something else of nodes by now does not believe them.
    """
    try:
        text = conf.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    rules = rules_of(conf)
    return {"conf": str(conf), "crc": engine.crc_of_nodes(text), "rules": rules} if rules else {}


def rules_of(conf: Path) -> list[dict[str, Any]]:
    """One rule for each NodeName line: match, count (of CPUs), real_memory_mb."""
    rules: list[dict[str, Any]] = []
    default: dict[str, str] = {}
    for line in _lines(conf, [0]):
        fields = {key.lower(): value for key, value in re.findall(r"([A-Za-z]+)=(\S+)", line)}
        name = fields.pop("nodename", "")
        if name.upper() == "DEFAULT":
            default.update(fields)
        elif name:
            known = {**default, **fields}
            rule: dict[str, Any] = {"match": name}
            cpus = _cpus(fields) or _cpus(known)
            if cpus:
                rule["count"] = cpus
            if known.get("realmemory", "").isdigit():
                rule["real_memory_mb"] = int(known["realmemory"])
            rules.append(rule)
    return [rule for rule in rules if len(rule) > 1]


def _lines(path: Path, read: list[int]) -> list[str]:
    """The lines of a slurm.conf and of what it includes, continued ones put together, comments gone."""
    read[0] += 1
    if read[0] > _MOST_INCLUDES:
        return []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    out = []
    for line in text.replace("\\\n", " ").splitlines():
        line = line.split("#")[0].strip()
        found = re.match(r"[Ii]nclude\s+(\S+)\Z", line)
        if found:
            out += _lines(path.parent / found.group(1), read)
        else:
            out.append(line)
    return [line for line in out if line]


def _cpus(fields: dict[str, str]) -> int:
    """CPUs, or the product that Slurm takes for it.  Source: slurm.conf(5), CPUs."""
    for key in ("cpus", "procs"):
        if fields.get(key, "").isdigit():
            return int(fields[key])
    sockets = fields.get("sockets", "")
    if not sockets and fields.get("boards", "").isdigit() and fields.get("socketsperboard", "").isdigit():
        sockets = str(int(fields["boards"]) * int(fields["socketsperboard"]))
    parts = [sockets, fields.get("corespersocket", "1"), fields.get("threadspercore", "1")]
    return int(parts[0]) * int(parts[1]) * int(parts[2]) if all(part.isdigit() for part in parts) else 0
