"""What would go wrong with this installation?  Every finding before Slurm finds it by draining a node."""

from __future__ import annotations

import glob
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_resilience.errors import ConfigError
from slurm_resilience.hooks import files, world
from slurm_resilience.hooks.admin import configuration, install
from slurm_resilience.hooks.admin.entries import KINDS, Places


@dataclass(frozen=True)
class Finding:
    """``level`` is error (a hook would not work, or a node would be drained) or warning."""

    level: str
    text: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def inspect(places: Places, slurm_conf: Path | None) -> list[Finding]:
    """All findings; none is good."""
    found: list[Finding] = []
    compiled: dict[str, Any] = {}
    try:
        compiled = configuration.read(places.config, slurm_conf)
    except ConfigError as error:
        found.append(Finding("error", str(error)))
    try:
        in_use = world.load_settings(str(places.compiled))
        if compiled.get("promised") and in_use.get("promised") != compiled["promised"]:
            found.append(Finding("warning", "slurm.conf promises something else of nodes by now: run hooks check --write"))
    except world.BadSettings as error:
        found.append(Finding("error", f"the hooks do nothing: {error}"))
    for path in (places.python, places.library / "start.py", places.config):
        found += _trust(path)
    found += [item for kind in KINDS.values() if places.entry(kind).exists() for item in _trust(places.entry(kind), run=True)]
    found += _tools(compiled)
    found += _promises(compiled)
    if slurm_conf is not None:
        found += _slurm_conf(places, install.settings_of(slurm_conf))
    return found


def _trust(path: Path, *, run: bool = False) -> list[Finding]:
    why = files.distrust(str(path), os.geteuid())
    if why:
        return [Finding("error", f"{path} must not be run or read by root: {why}")]
    if run and not os.access(path, os.X_OK):
        return [Finding("error", f"{path} is not executable: Slurm would drain every node for it")]
    return []


def _promises(compiled: dict[str, Any]) -> list[Finding]:
    """Checks that compare the machine with nothing."""
    found, rules = [], compiled.get("promised", {}).get("rules", [])
    for name, key in (("cpu", "count"), ("memory", "real_memory_mb")):
        entry = compiled.get("checks", {}).get(name, {"mode": "off"})
        told = key in entry.get("options", {}) or any(key in rule.get("options", {}) for rule in entry.get("nodes", []))
        if entry["mode"] != "off" and not told and not any(key in rule for rule in rules):
            what = f"{name}: nothing to compare with: name slurm.conf with --slurm-conf or slurm.conf, or give {key}"
            found.append(Finding("warning", what))
    return found


def _tools(compiled: dict[str, Any]) -> list[Finding]:
    found = []
    for tool in ("scontrol", "squeue", "sacctmgr"):
        path = str(compiled.get("slurm", {}).get(tool, ""))
        if path and not os.access(path, os.X_OK):
            found.append(Finding("error", f"{path} is not there: nothing can be drained (slurm.{tool})"))
        elif path and files.distrust(path, os.geteuid()):
            found.append(Finding("error", f"slurm.{tool}: {files.distrust(path, os.geteuid())}"))
    for name, entry in compiled.get("checks", {}).items():
        if entry.get("mode") == "off":
            continue
        for tool in filter(None, [entry.get("command"), *(entry["options"].get(each) for each in configuration.TOOLS)]):
            if not os.access(tool, os.X_OK):
                found.append(Finding("warning", f"{name}: {tool} cannot be run here; the check will say unknown"))
            elif files.distrust(tool, os.geteuid()):
                found.append(Finding("error", f"{name}: {files.distrust(tool, os.geteuid())}"))
    return found


def _slurm_conf(places: Places, settings: dict[str, str]) -> list[Finding]:
    found = []
    for key, kind in KINDS.items():
        value = settings.get(key, "")
        if not value:
            found.append(Finding("warning", f"slurm.conf has no {key}: our {kind} never runs"))
        elif value != str(places.entry(kind)):
            found.append(Finding("warning", f"slurm.conf's {key} is {value}: our {kind} never runs"))
            found += scripts(key, value)
    parameters = settings.get("SchedulerParameters", "")
    if "nohold_on_prolog_fail" in parameters:
        found.append(Finding("warning", "nohold_on_prolog_fail: one job whose prolog always fails goes from node to node"))
    if settings.get("HealthCheckProgram") and settings.get("HealthCheckInterval", "0") == "0":
        found.append(Finding("error", "HealthCheckInterval=0: the periodic check never runs, nothing is ever returned"))
    if settings.get("HealthCheckNodeState", "ANY").upper() not in ("ANY", "ANY,CYCLE", "CYCLE,ANY"):
        found.append(Finding("warning", "HealthCheckNodeState is not ANY: drained nodes are not looked at and never return"))
    if not any(key.lower() in ("prologepilogtimeout", "prologtimeout") for key in settings):
        found.append(
            Finding("warning", "PrologEpilogTimeout is not set: any prolog of the site that hangs holds jobs for ever")
        )
    return found


def scripts(key: str, value: str) -> list[Finding]:
    """What a Prolog or Epilog of the site would do to its nodes.  Source: tried on 22.05; a failing one drains the node."""
    if not any(mark in value for mark in "*?["):
        if not os.path.exists(value):
            return [Finding("error", f"{key}={value} does not exist")]
        return _trust(Path(value), run=True)
    names = sorted(glob.glob(value))
    if not names:
        return [Finding("error", f"{key}={value} matches nothing: an empty folder fails, and Slurm drains the node")]
    found = []
    for name in names:
        if os.path.isdir(name):
            found.append(Finding("error", f"{name} is a folder in {key}: Slurm drains the node"))
        elif not os.access(name, os.X_OK) or not os.stat(name).st_mode & 0o111:
            found.append(Finding("error", f"{name} is not executable (a README, a backup?): Slurm drains the node"))
        elif name.endswith(("~", ".bak", ".orig", ".rpmnew", ".rpmsave", ".dpkg-dist", ".dpkg-old", ".swp")):
            found.append(Finding("warning", f"{name} looks like an editor's or a package's backup, and Slurm runs it"))
    return found
