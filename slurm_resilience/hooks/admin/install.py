"""Installs, compares and removes the hooks.  Twice is once; what was there before comes back with uninstall."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import slurm_resilience.hooks
from slurm_resilience import __version__
from slurm_resilience._atomic import write_atomic
from slurm_resilience.errors import ConfigError
from slurm_resilience.hooks import files, hints, world
from slurm_resilience.hooks.admin import configuration, entries
from slurm_resilience.hooks.admin.entries import KINDS, Places

PREFIX = Path("/usr/local/lib/slurm-resilience-hooks")
STATE = Path("/var/lib/slurm-resilience/hooks")
PYTHONS = ("/usr/libexec/platform-python", "/usr/bin/python3")
BACKUP = ".before-slurm-resilience"
LUA = ("job_submit.lua", "cli_filter.lua")  # beside the hooks, for the admin to put beside slurm.conf
INTERVAL_S = 300
_LOGROTATE = """{state}/*/ledger.jsonl {{
    weekly
    rotate 8
    compress
    missingok
    notifempty
    su root root
}}
"""


@dataclass
class Change:
    """One file as it is to be; ``text`` None for a file to be removed."""

    path: Path
    text: str | None
    mode: int = 0o644

    def needed(self) -> bool:
        if self.text is None:
            return self.path.exists()
        if not self.path.is_file() or self.path.is_symlink() or self.path.stat().st_mode & 0o777 != self.mode:
            return True
        return self.path.read_text(encoding="utf-8") != self.text


@dataclass
class Installation:
    """Everything that ``install`` would do, before it does it."""

    places: Places
    root: Path
    slurm_conf: Path | None
    kinds: tuple[str, ...]
    changes: list[Change] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)  # slurm.conf key -> value
    before: dict[str, str] = field(default_factory=dict)

    def on_disk(self, path: Path) -> Path:
        """Where a path of the node is on this machine (``--root`` is a node image)."""
        return self.root / path.relative_to("/") if self.root != Path("/") else path


def python_of(wanted: str | None) -> Path:
    """The interpreter that root will run: the system's own.  Raises :class:`ConfigError` for one that others can change."""
    for name in [wanted] if wanted else PYTHONS:
        if name and os.access(name, os.X_OK):
            why = files.distrust(name)
            if why:
                raise ConfigError(f"root must not run {name}", evidence=why, remedy="choose the system's with --python")
            return Path(name)
    raise ConfigError("There is no Python for the nodes", evidence=f"looked for {wanted or ', '.join(PYTHONS)}")


def plan(
    places: Places, *, root: Path = Path("/"), slurm_conf: Path | None = None, kinds: tuple[str, ...] = tuple(KINDS.values())
) -> Installation:
    """What an installation consists of.  Writes nothing.  Raises :class:`ConfigError` for places that others can write."""
    todo = Installation(places, root, slurm_conf, kinds)
    for path in (places.prefix, places.config, places.state):
        _refuse_writable(todo.on_disk(path))
    source = Path(slurm_resilience.hooks.__file__).parent
    for path in sorted([*source.glob("*.py"), *source.glob("checks/*.py")]):
        to = places.library / path.relative_to(source)
        todo.changes.append(Change(todo.on_disk(to), path.read_text(encoding="utf-8")))
    wanted = {change.path for change in todo.changes}
    for path in sorted(todo.on_disk(places.library).rglob("*.py")):
        if path not in wanted:  # an earlier release's
            todo.changes.append(Change(path, None))
    wanted = {change.path for change in todo.changes}
    for path in sorted(todo.on_disk(places.library).rglob("*.py")):
        if path not in wanted:  # an earlier release's
            todo.changes.append(Change(path, None))
    if not todo.on_disk(places.config).exists():
        todo.changes.append(Change(todo.on_disk(places.config), configuration.DEFAULT_TEXT))
    todo.before = settings_of(slurm_conf) if slurm_conf else {}
    remembered = _receipt(todo).get("before", {})
    for key, value in _receipt(todo).get("lines", {}).items():
        if key not in KINDS and todo.before.get(key) == value:  # ours, from an earlier installation
            todo.lines[key], todo.before[key] = value, remembered.get(key, "")
    for key, kind in KINDS.items():
        if kind not in kinds:
            continue
        there = todo.before.get(key, "")
        ours = str(places.entry(kind))
        chained = remembered.get(key, "") if there == ours else there
        if any(mark in chained for mark in "*?["):
            script = places.prefix / "bin" / f"chained-{kind}"
            todo.changes.append(Change(todo.on_disk(script), entries.chain_of(chained), 0o755))
            chained = str(script)
        todo.changes.append(Change(todo.on_disk(places.entry(kind)), entries.entry(places, kind, chained), 0o755))
        todo.lines[key] = ours
        todo.before[key] = remembered.get(key, "") if there == ours else there
    if "healthcheck" in kinds:
        if "HealthCheckInterval" not in todo.lines and todo.before.get("HealthCheckInterval", "0") in ("", "0"):
            todo.lines["HealthCheckInterval"] = str(INTERVAL_S)
        if "HealthCheckNodeState" not in todo.lines and not todo.before.get("HealthCheckNodeState"):
            todo.lines["HealthCheckNodeState"] = "ANY"
    for name in LUA:
        todo.changes.append(Change(todo.on_disk(places.prefix / "lua" / name), entries.shipped(name)))
    rotate = todo.on_disk(logrotate_of(places))
    if rotate.parent.is_dir() or places.prefix != PREFIX:
        todo.changes.append(Change(rotate, _LOGROTATE.format(state=places.state)))
    return todo


def apply(todo: Installation, *, write_slurm_conf: bool = False) -> list[str]:
    """Do it; the files that were changed.  Raises :class:`ConfigError` before anything when the configuration is wrong."""
    places = todo.places
    config = todo.on_disk(places.config)
    text = next((change.text for change in todo.changes if change.path == config), None)
    if write_slurm_conf and todo.slurm_conf is not None:
        _refuse_spread(todo)
    if write_slurm_conf and todo.slurm_conf is not None:
        _refuse_spread(todo)
    configuration.compile_text(text or config.read_text(encoding="utf-8"), str(places.config))
    changed = []
    for change in todo.changes:
        if change.needed():
            if change.text is None:
                change.path.unlink()
            else:
                _root_folder(change.path.parent)
                write_atomic(change.path, change.text, mode=change.mode)
                os.chmod(change.path, change.mode)
            changed.append(str(change.path))
    compiled = {**configuration.read(config, todo.slurm_conf), "source": str(places.config)}
    out = Change(todo.on_disk(places.compiled), json.dumps(compiled, sort_keys=True) + "\n")
    if out.needed():
        configuration.keep(config)
        write_atomic(out.path, out.text or "")
        os.chmod(out.path, 0o644)
        changed.append(str(out.path))
    if changed and todo.root == Path("/"):  # bytecode of the interpreter that will read it
        subprocess.run([str(places.python), "-I", "-S", "-m", "compileall", "-q", str(places.library)], check=False)
    if todo.root == Path("/"):
        _root_folder(places.state.parent)
        files.private_folder(str(places.state))
        if "epilogslurmctld" in todo.kinds:
            _controller_folder(entries.controller_state(places), todo.slurm_conf)
    # What an earlier installation of other hooks (--only) wrote down still counts
    earlier = _receipt(todo)
    receipt = {"v": 1, "release": __version__, "lines": {**earlier.get("lines", {}), **todo.lines}}
    receipt["before"] = {**earlier.get("before", {}), **{key: todo.before.get(key, "") for key in todo.lines}}
    write_atomic(todo.on_disk(places.prefix) / "install.json", json.dumps(receipt, sort_keys=True) + "\n")
    if write_slurm_conf and todo.slurm_conf is not None:
        text = with_settings(todo.slurm_conf.read_text(encoding="utf-8"), todo.lines)
        if text != todo.slurm_conf.read_text(encoding="utf-8"):
            backup = todo.slurm_conf.with_name(todo.slurm_conf.name + BACKUP)
            if not backup.exists():
                shutil.copy2(todo.slurm_conf, backup)
            write_atomic(todo.slurm_conf, text, mode=todo.slurm_conf.stat().st_mode & 0o777)
            changed.append(str(todo.slurm_conf))
    return changed


def uninstall(places: Places, *, root: Path = Path("/"), slurm_conf: Path | None = None, purge: bool = False) -> list[str]:
    """Put slurm.conf's lines back as they were, and remove the files; configuration and ledgers only with ``purge``.

    A Prolog or Epilog that is missing drains every node, and slurmd calls the one that it knows until it is told of
    another: in its place stays an entry that does nothing but what was chained, until ``purge`` finds that Slurm calls it
    no more.
    """
    todo = Installation(places, root, slurm_conf, ())
    gone = []
    before = _receipt(todo).get("before", {})
    if slurm_conf is not None and before:
        now = settings_of(slurm_conf)
        ours = {key for key in before if key not in KINDS or now.get(key) == str(places.entry(KINDS[key]))}
        text = with_settings(slurm_conf.read_text(encoding="utf-8"), {key: before[key] for key in ours})
        write_atomic(slurm_conf, text, mode=slurm_conf.stat().st_mode & 0o777)
        gone.append(str(slurm_conf))
    prefix = todo.on_disk(places.prefix)
    if not purge or still_called(places, root, slurm_conf):
        folders = [path for path in (places.library.parent, places.prefix / "lua") if todo.on_disk(path).exists()]
        for kind in KINDS.values():
            if todo.on_disk(places.entry(kind)).exists():
                _leave_a_stub(todo.on_disk(places.entry(kind)))
    else:
        folders = [places.prefix]
    if purge:
        folders += [places.state, places.config, places.compiled, *configuration.kept(places.config)]
        folders.append(entries.controller_state(places))
        if root == Path("/"):
            folders.append(Path(world.FALLBACK_STATE))
        mounted = root == Path("/") and os.path.ismount(hints.BOX)  # made by the hooks on this node
        if mounted and subprocess.run(["umount", hints.BOX], check=False).returncode == 0:
            os.rmdir(hints.BOX)
            gone.append(hints.BOX)
    for path in [*folders, logrotate_of(places)]:
        there = todo.on_disk(path)
        if there.is_dir():
            shutil.rmtree(there)
        elif there.exists():
            there.unlink()
        else:
            continue
        gone.append(str(there))
    folder = todo.on_disk(places.config.parent)
    if purge and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        gone.append(str(folder))
    if prefix.is_dir() and not (prefix / "bin").is_dir():
        shutil.rmtree(prefix)
    return gone


def still_called(places: Places, root: Path, slurm_conf: Path | None) -> bool:
    """May Slurm call one of our entries?  As it says itself; without an answer it may, where there is a Slurm at all."""
    scontrol = shutil.which("scontrol")
    if root != Path("/") or scontrol is None:
        return False
    env = {**os.environ, **({"SLURM_CONF": str(slurm_conf)} if slurm_conf else {})}
    try:
        done = subprocess.run([scontrol, "show", "config"], env=env, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode:
        return "configuration source" not in done.stderr
    return f"{places.prefix}/bin/" in done.stdout


def _leave_a_stub(entry: Path) -> None:
    chained = re.search(r"^chained='([^']*)'$", entry.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    then = f"exec '{chained.group(1)}'\n" if chained and chained.group(1) else ""
    keep = f"chained='{chained.group(1) if chained else ''}'\n"
    why = "# slurm-resilience was uninstalled; this stays for a Slurm that has not been told so yet."
    write_atomic(entry, f"#!/bin/sh\n{why}\n{keep}{then}exit 0\n", mode=0o755)
    entry.chmod(0o755)


def logrotate_of(places: Places) -> Path:
    """Where logrotate finds it; beside the hooks when they are not in their usual place: then it is for the admin to link."""
    return Path("/etc/logrotate.d/slurm-resilience-hooks") if places.prefix == PREFIX else places.prefix / "logrotate.conf"


def settings_of(path: Path) -> dict[str, str]:
    """The settings of a slurm.conf and of what it includes that stand alone on their lines; the last of each key counts,
    as for Slurm.  A Prolog that is named without its folder is beside slurm.conf (Slurm 23.11 and newer)."""
    canonical = {key.lower(): key for key in [*KINDS, "HealthCheckInterval", "HealthCheckNodeState"]}
    found = {}
    for _, key, value in _settings(path):
        name = canonical.get(key.lower(), key)
        relative = name in ("Prolog", "Epilog") and value and not value.startswith("/")
        found[name] = str(path.parent / value) if relative else value
    return found


def _settings(path: Path, depth: int = 0) -> list[tuple[Path, str, str]]:
    """(file, key, value) of each line."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if depth:
            return []
        raise ConfigError(f"{path} cannot be read", evidence=str(error)) from error
    found = []
    for line in text.splitlines():
        include = re.match(r"\s*[Ii]nclude\s+(\S+)\s*(?:#.*)?$", line)
        match = re.match(r"\s*([A-Za-z]+)\s*=\s*(.*?)\s*(?:#.*)?$", line)
        if include and depth < 5:
            found += _settings(path.parent / include.group(1), depth + 1)
        elif match:
            found.append((path, match.group(1), match.group(2).strip('"')))
    return found


def _refuse_spread(todo: Installation) -> None:
    """Lines that we would not replace, or of which we would drop one."""
    assert todo.slurm_conf is not None
    ours = {key.lower(): key for key in todo.lines}
    seen: dict[str, str] = {}
    for path, key, value in _settings(todo.slurm_conf):
        name = ours.get(key.lower())
        if name and path != todo.slurm_conf:
            raise ConfigError(f"{name} is set in {path}, which {todo.slurm_conf} includes", evidence=f"{name}={value}",
                              remedy="without --write, and change that file by hand")  # fmt: skip
        if name in KINDS and seen.setdefault(name, value) != value:
            raise ConfigError(f"{todo.slurm_conf} has several lines of {name}", evidence=f"{seen[name]}, {value}",
                              remedy="without --write; put all but one into a script or a folder first")  # fmt: skip


def with_settings(text: str, values: dict[str, str]) -> str:
    """A slurm.conf with these settings, each once, all else untouched; an empty value takes the line away."""
    left = {key.lower(): (key, value) for key, value in values.items()}
    out = []
    for line in text.splitlines():
        match = re.match(r"\s*([A-Za-z]+)\s*=", line)
        entry = left.get(match.group(1).lower()) if match else None
        if entry is None:
            out.append(line)
        elif entry[1]:
            out.append(f"{entry[0]}={entry[1]}")
            left[entry[0].lower()] = (entry[0], "")
    out += [f"{key}={value}" for key, value in left.values() if value]
    return "\n".join(out) + "\n"


def _receipt(todo: Installation) -> dict[str, Any]:
    return files.read_json(str(todo.on_disk(todo.places.prefix) / "install.json"))


def _refuse_writable(path: Path) -> None:
    there = path
    while not there.exists():
        there = there.parent
    why = files.distrust(str(there.resolve()), os.geteuid())
    if why:
        raise ConfigError(
            f"root must not run or read anything under {path}", evidence=why, remedy="choose a folder of root's own"
        )


def _controller_folder(path: Path, slurm_conf: Path | None) -> None:
    """EpilogSlurmctld runs as SlurmUser, who keeps a ledger of his own."""
    _root_folder(path)
    path.chmod(0o700)
    settings = {key.lower(): value for key, value in settings_of(slurm_conf).items()} if slurm_conf else {}
    user = re.sub(r"\(.*", "", settings.get("slurmuser", "slurm"))
    try:
        shutil.chown(path, int(user) if user.isdigit() else user)
    except LookupError:
        return  # there is no such user here: on nodes nobody needs it


def _root_folder(path: Path) -> None:
    """Made with mode 755 whatever root's umask is."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir()
        each.chmod(0o755)
