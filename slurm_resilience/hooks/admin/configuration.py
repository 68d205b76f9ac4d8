"""hooks.yaml, validated to the last key and compiled to the JSON that the hooks read."""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import write_atomic, write_json_atomic
from slurm_resilience.errors import ConfigError, nearest
from slurm_resilience.hooks import budget, checks, engine, files
from slurm_resilience.hooks.admin import promised
from slurm_resilience.hooks.reason import RENAMED
from slurm_resilience.hooks.world import MOST_BYTES, VERSION

CONFIG = Path("/etc/slurm-resilience/hooks.yaml")
CONTEXTS = ("prolog", "epilog", "periodic", "boot")
SEVERITIES = (checks.FLAG, checks.DRAIN_AFTER, checks.DRAIN_NOW)
BLAMES = (checks.NODE, checks.JOB, checks.FABRIC, checks.NOBODY)

# section -> key -> default.  A key that is not here is refused: a typo must not switch a limit off.
SECTIONS: dict[str, dict[str, Any]] = {
    "slurm": {
        "scontrol": "/usr/bin/scontrol", "squeue": "/usr/bin/squeue", "sacctmgr": "/usr/bin/sacctmgr", "conf": "",
        "call_s": 3.0, "accounting": False,
    },
    "budget": {**budget.DEFAULTS, "jitter_s": 0.3},
    "return": {"passes": 3, "hold_s": 600, "per_day": 3},
    "verdict": {"fresh_s": 600},
    "hints": {"box": "/run/slurm-resilience-hints"},
    "expedite": {"jobs": "resilient"},
    "drain_now": {"requeue": "off"},
    "metrics": {"folder": ""},
}  # fmt: skip
OPTIONS: dict[str, tuple[str, ...]] = {
    "clock": ("chronyc", "fail_s", "warn_s", "jump_s"),
    "cpu": ("count",),
    "dcgm": ("dcgmi", "group"),
    "filesystem": ("paths",),
    "gpu": ("count", "nvidia_smi"),
    "gpu_memory": ("count", "nvidia_smi"),
    "gpu_strangers": ("count", "least_uid", "nvidia_smi"),
    "infiniband": ("ports", "rate_gbps", "flaps", "window_s"),
    "leftovers": ("fix", "least_uid"),
    "lockups": (),
    "memory": ("real_memory_mb", "tolerance_percent"),
    "memory_errors": ("corrected", "uncorrected"),
    "nvlink": ("links", "nvidia_smi"),
    "oom": (),
    "pcie": ("nvidia_smi", "width"),
    "services": ("names", "systemctl"),
    "tmpfiles": ("fix", "least_uid", "paths", "squeue"),
    "xid": ("nvidia_smi",),
}
TOOLS = ("nvidia_smi", "chronyc", "squeue", "dcgmi", "systemctl")
_LISTS = {
    "paths": None,
    "ports": re.compile(r"[A-Za-z0-9_-]+:[0-9]+"),
    "names": re.compile(r"[A-Za-z0-9@._:\\-]+"),
}  # fmt: skip
_MOST = 1e15  # no number of ours is greater; neither infinite nor none
_NAME = re.compile(r"[a-z][a-z0-9_]{0,23}")
_MATCH = re.compile(r"(?:[A-Za-z0-9_.*,-]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+")
_PATH_OPTIONS = ("path", "mount", "type", "read_only_ok", "free_percent", "full_drains")
_CHECK_KEYS = ("mode", "contexts", "timeout_s", "severity", "after_fails", "options", "nodes")
_SITE_KEYS = (*_CHECK_KEYS[:5], "nodes", "command", "blame")

DEFAULT_TEXT = """\
# What slurm-resilience does on every node.  After a change:  slurm-resilience hooks check --write
# Modes of a check: off, observe (record what it would do), comment (mark the node), drain (within the budget below).
mode: observe
checks:
  filesystem: {options: {paths: [/, /tmp]}}
  memory: {}
  cpu: {}
  memory_errors: {}
  oom: {}
  clock: {}
  leftovers: {}
  tmpfiles: {}
  lockups: {}
  # services: {options: {names: [munge, sssd]}}
  # gpu: {options: {count: 8}}
  # gpu_memory: {options: {count: 8}}
  # gpu_strangers: {options: {count: 8}}
  # xid: {}
  # nvlink: {options: {links: 18}}
  # pcie: {options: {width: 16}}
  # infiniband: {options: {ports: ["mlx5_0:1"], rate_gbps: 400}}
  # dcgm: {options: {dcgmi: /usr/bin/dcgmi}}
  # A check of your own: any executable of root's; exit 0 ok, 1 warn, 2 fail, 3 unknown, and one line of text.
  # site_scratch: {command: /usr/local/sbin/check-scratch, contexts: [prolog, periodic], timeout_s: 5, blame: fabric}
budget: {max_nodes: 10, max_percent: 5, partition_max_percent: 25}
return: {passes: 3, hold_s: 600, per_day: 3}
"""


def compile_file(path: Path, into: Path, slurm_conf: Path | None = None) -> dict[str, Any]:
    """Read, validate, and write the compiled form next to it for root's hooks.  Raises :class:`ConfigError`."""
    compiled = read(path, slurm_conf)
    keep(path)
    write_json_atomic(into, compiled, mode=0o644)
    return compiled


def keep(path: Path) -> None:
    """Keep a copy of what is being compiled, and of what was compiled before it."""
    text, (now, before) = path.read_text(encoding="utf-8"), kept(path)
    last = now.read_text(encoding="utf-8") if now.exists() else None
    if last != text:
        if last is not None:
            write_atomic(before, last)
        write_atomic(now, text)


def kept(path: Path) -> tuple[Path, Path]:
    """Where the copies are: of the configuration that is compiled now, and of the one before."""
    return path.with_name(path.name + ".compiled"), path.with_name(path.name + ".before")


def roll_back(path: Path, into: Path, slurm_conf: Path | None = None) -> dict[str, Any]:
    """The configuration that was compiled before this one is the one again.  Raises :class:`ConfigError`."""
    before = kept(path)[1]
    if not before.exists():
        raise ConfigError(f"There is no configuration before {path}", evidence=f"{before} does not exist",
                          remedy="it is kept from the second `hooks check --write` on")  # fmt: skip
    text = before.read_text(encoding="utf-8")
    compile_text(text, str(before))
    write_atomic(path, text)
    return compile_file(path, into, slurm_conf)


def read(path: Path, slurm_conf: Path | None = None) -> dict[str, Any]:
    """The compiled form of a configuration file, with what slurm.conf promises of the nodes."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", evidence=str(error), remedy="hooks install writes a first one") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8", evidence=str(error)) from error
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{path} is too long", evidence=f"{len(text)} characters, {MOST_BYTES} may be")
    compiled = compile_text(text, str(path))
    last = files.read_json(str(path.with_suffix(".json")), 16 * MOST_BYTES).get("promised")
    last = last.get("conf") if isinstance(last, dict) else None  # a slurm.conf that was named once is asked again
    conf = slurm_conf or Path(compiled["slurm"]["conf"] or (last if isinstance(last, str) else promised.USUAL))
    crc = binascii.crc32(text.encode())
    return {**compiled, "promised": promised.promises(conf), "source": str(path), "source_crc": crc}


def compile_text(text: str, name: str = "hooks.yaml") -> dict[str, Any]:
    """The compiled form, every default filled in.  Raises :class:`ConfigError` that names the key and the nearest valid one."""
    import yaml

    try:
        _once(yaml.compose(text, Loader=yaml.SafeLoader), name)
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date that is none is a ValueError
        raise ConfigError(f"{name} is not YAML", evidence=" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deep") from error
    value = _mapping(value if value is not None else {}, name)
    _known(value, [*SECTIONS, "checks", "mode"], name)
    mode = _one_of(value.get("mode", "observe"), engine.MODES, f"{name}: mode")
    compiled: dict[str, Any] = {"v": VERSION}
    for section, defaults in SECTIONS.items():
        given = _mapping(value.get(section, {}), f"{name}: {section}")
        _known(given, defaults, f"{name}: {section}")
        for key, item in given.items():
            _alike("off" if item is False and section in ("expedite", "drain_now") else item, defaults[key],
                   f"{name}: {section}.{key}")  # fmt: skip
        compiled[section] = {**defaults, **given}
    for section, key in (("expedite", "jobs"), ("drain_now", "requeue")):
        if compiled[section][key] is False:  # YAML's off
            compiled[section][key] = "off"
    _one_of(compiled["drain_now"]["requeue"], ("off", "resilient", "all"), f"{name}: drain_now.requeue")
    _one_of(compiled["expedite"]["jobs"], ("off", "resilient", "all"), f"{name}: expedite.jobs")
    for tool in ("scontrol", "squeue", "sacctmgr"):
        _absolute(compiled["slurm"][tool], f"{name}: slurm.{tool}")
    entries = _mapping(value.get("checks", {}), f"{name}: checks")
    compiled["checks"] = {key: _check(key, entry, mode, compiled, f"{name}: checks.{key}") for key, entry in entries.items()}
    return compiled


def _once(node: Any, where: str) -> None:
    """A key that stands there twice is refused: YAML itself would drop the first one without a word."""
    pairs = node.value if node is not None and node.id == "mapping" else []
    keys = [str(key.value) for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{where}: {key} stands there twice")
    for child in [value for _, value in pairs] + (node.value if node is not None and node.id == "sequence" else []):
        _once(child, where)


def _check(name: str, entry: Any, mode: str, compiled: dict[str, Any], where: str) -> dict[str, Any]:
    given = _mapping(entry if entry is not None else {}, where)
    if name in checks.ALL:
        _known(given, _CHECK_KEYS, where)
        module: Any = checks.module(name)
        contexts, timeout_s, severity = list(module.CONTEXTS), module.TIMEOUT_S, module.SEVERITY
    elif "command" in given:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: a check's name is of a-z, 0-9 and _, and not longer than 24")
        if name == "manual" or name in RENAMED:
            raise ConfigError(f"{where}: the name {name!r} is taken", remedy=f"call it site_{name}")
        _known(given, _SITE_KEYS, where)
        _absolute(given["command"], f"{where}.command")
        contexts, timeout_s, severity = ["periodic"], 5.0, checks.DRAIN_AFTER
    else:
        raise ConfigError(f"{where}: unknown check: {nearest(name, checks.ALL)}", remedy="a check of your own has a command")
    out: dict[str, Any] = {
        "mode": _one_of(given.get("mode", mode), engine.MODES, f"{where}.mode"),
        "contexts": [_one_of(c, CONTEXTS, f"{where}.contexts") for c in _listed(given, "contexts", contexts, where)],
        "timeout_s": _positive(given.get("timeout_s", timeout_s), f"{where}.timeout_s"),
        "severity": _one_of(given.get("severity", severity), SEVERITIES, f"{where}.severity"),
        "after_fails": _count(given.get("after_fails", 1), f"{where}.after_fails"),
        "options": _options(name, given.get("options", {}), f"{where}.options"),
    }
    if "command" in given:
        out["command"] = given["command"]
        out["blame"] = _one_of(given.get("blame", checks.NODE), BLAMES, f"{where}.blame")
    if name == "tmpfiles":
        out["options"].setdefault("squeue", compiled["slurm"]["squeue"])
    rules = given.get("nodes", [])
    if not isinstance(rules, list):
        raise ConfigError(f"{where}.nodes must be a list of rules, each with a match")
    for index, rule in enumerate(rules):
        _known(
            _mapping(rule, f"{where}.nodes[{index}]"), ("match", "options", "mode", "severity", "after_fails"), f"{where}.nodes"
        )
        if not isinstance(rule.get("match"), str) or not _MATCH.fullmatch(rule["match"]):
            raise ConfigError(f"{where}.nodes[{index}] needs a match such as gpu[1-4]")
        _options(name, rule.get("options", {}), f"{where}.nodes[{index}].options")
        checked = {**rule, "mode": _one_of(rule.get("mode", mode), engine.MODES, f"{where}.nodes[{index}].mode")}
        if "mode" not in rule:
            del checked["mode"]
        if "severity" in rule:
            _one_of(rule["severity"], SEVERITIES, f"{where}.nodes[{index}].severity")
        if "after_fails" in rule:
            checked["after_fails"] = _count(rule["after_fails"], f"{where}.nodes[{index}].after_fails")
        out.setdefault("nodes", []).append(checked)
    return out


def _options(name: str, value: Any, where: str) -> dict[str, Any]:
    given = dict(_mapping(value, where))
    _known(given, OPTIONS.get(name, ()), where)
    for key, item in given.items():
        if key in TOOLS:
            _absolute(item, f"{where}.{key}")
        elif key in _LISTS:
            _list(item, _LISTS[key], f"{where}.{key}")
        else:  # a word where a number belongs would switch the check off
            _alike(item, False if key == "fix" else 0, f"{where}.{key}")
    for path in given.get("paths", []):
        if isinstance(path, Mapping) and name == "filesystem":
            _known(path, _PATH_OPTIONS, f"{where}.paths")
            for key, item in path.items():
                if key not in ("path", "type"):
                    _alike(item, 0 if key == "free_percent" else False, f"{where}.paths.{key}")
            path = path.get("path")
        _absolute(path, f"{where}.paths")
    return given


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where} must be a mapping of names to values, not {value!r}")
    return value


def _known(value: Mapping[str, Any], names: Any, where: str) -> None:
    for key in value:
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}: {nearest(key, names)}")


def _alike(value: Any, default: Any, where: str) -> None:
    if isinstance(default, bool):
        fits = isinstance(value, bool)
    elif isinstance(default, (int, float)):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _MOST
    else:
        fits = isinstance(value, str)
    if not fits:
        raise ConfigError(f"{where} must be like {default!r}, not {value!r}")


def _list(value: Any, form: re.Pattern[str] | None, where: str) -> None:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, not {value!r}")
    for item in value if form is not None else []:
        if not isinstance(item, str) or form is None or not form.fullmatch(item) or item.startswith("-"):
            raise ConfigError(f"{where}: {item!r} is no such name")


def _one_of(value: Any, names: Any, where: str) -> str:
    if value is False and "off" in names:  # YAML reads a bare `off` as false
        value = "off"
    if not isinstance(value, str) or value not in names:
        raise ConfigError(f"{where}: {value!r}: {nearest(str(value), names)}")
    return value


def _listed(given: Mapping[str, Any], key: str, default: list[str], where: str) -> list[Any]:
    value = given.get(key, default)
    if not isinstance(value, list):
        raise ConfigError(f"{where}.{key} must be a list, not {value!r}")
    return value


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**6:
        raise ConfigError(f"{where} must be a whole number above 0, not {value!r}")
    return value


def _positive(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _MOST:
        raise ConfigError(f"{where} must be a number above 0, not {value!r}")
    return float(value)


def _absolute(value: Any, where: str) -> None:
    if not isinstance(value, str) or not value.startswith("/") or "\n" in value:
        raise ConfigError(f"{where} must be an absolute path, not {value!r}", evidence="hooks have no PATH to search")
