"""Everything a hook knows about where it is: the node, the boot, the job, the settings, its folder, its time.

Only names on the list below are read from the environment, each only in the form that it must have: comments, names,
paths and SPANK variables of a job are never looked at.
"""

import os
import re
import time

from . import files
from .child import PATH

VERSION = 1
MOST_BYTES = 1 << 20  # of a configuration; of its compiled form, with what slurm.conf promises of thousands of nodes, more
FALLBACK_STATE = "/run/slurm-resilience"  # when /var is full or read-only
NOWHERE = "/dev/null/none"  # when that is not there either: every write to it fails, and is recorded by syslog
BOOT_ID = "/proc/sys/kernel/random/boot_id"

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_NUMBER = re.compile(r"[0-9]{1,12}\Z")
_FORMS = {
    "SLURM_JOB_ID": _NUMBER,
    "SLURM_JOB_UID": _NUMBER,
    "SLURM_JOB_NUM_NODES": _NUMBER,
    "SLURM_JOB_EXIT_CODE": _NUMBER,
    "SLURM_JOB_GPUS": re.compile(r"[0-9,]{1,200}\Z"),
    "SLURM_JOB_PARTITION": _NODE,
    "SLURM_CONF": re.compile(r"/[A-Za-z0-9_./+-]{1,250}\Z"),
}  # fmt: skip


class BadSettings(Exception):
    """The compiled configuration is missing, broken, stale or not trustworthy: report, and do nothing."""


class Job:
    """What is believed of the job: numbers only."""

    def __init__(self, environ: "dict[str, str]") -> None:
        def value(name: str) -> str:
            text = environ.get(name, "")
            return text if _FORMS[name].match(text) else ""

        self.id = value("SLURM_JOB_ID")
        self.uid = int(value("SLURM_JOB_UID") or -1)
        self.nodes = int(value("SLURM_JOB_NUM_NODES") or 0)
        # The raw wait status.  A cancelled and a requeued job have 0 too, so that 0 proves nothing.
        self.status = int(value("SLURM_JOB_EXIT_CODE") or 0)
        self.gpus = [index for index in value("SLURM_JOB_GPUS").split(",") if index]


class World:
    """Made once per call of a hook."""

    def __init__(
        self, context: str, node: str, settings: "dict[str, object]", state: str, environ: "dict[str, str]", deadline_s: float
    ) -> None:
        self.context = context
        self.node = node
        self.settings = settings
        self.state = state
        self.environ = environ
        self.job = Job(environ)
        self.deadline = time.monotonic() + deadline_s
        self.boot = boot_id()

    def remaining(self, most_s: float) -> float:
        """Seconds that a call may still take: never more than what is left of this hook's time, never nothing."""
        return max(0.2, min(most_s, self.deadline - time.monotonic()))

    def exhausted(self, need_s: float = 0.5) -> bool:
        return self.deadline - time.monotonic() < need_s

    def path(self, name: str) -> str:
        return os.path.join(self.state, name)

    def section(self, name: str) -> "dict[str, object]":
        found = self.settings.get(name)
        return found if isinstance(found, dict) else {}

    def number(self, section: str, name: str, default: float) -> float:
        found = self.section(section).get(name, default)
        return float(found) if isinstance(found, (int, float)) else default

    def text(self, section: str, name: str, default: str = "") -> str:
        found = self.section(section).get(name, default)
        return found if isinstance(found, str) else default

    def slurm_environment(self) -> "dict[str, str]":
        """For Slurm's commands, made from scratch.  SLURM_CONF is the configuration's; slurmd's own only when root's."""
        env = {"PATH": PATH, "LC_ALL": "C", "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
        conf = self.text("slurm", "conf")
        if not conf:
            offered = self.environ.get("SLURM_CONF", "")
            conf = offered if _FORMS["SLURM_CONF"].match(offered) and not files.distrust(offered, os.geteuid()) else ""
        if conf:
            env["SLURM_CONF"] = conf
        return env


def boot_id() -> str:
    """The kernel's name for this boot; "" where there is none."""
    try:
        return files.read(BOOT_ID, 64).strip().replace("-", "")
    except OSError:
        return ""


def node_name(environ: "dict[str, str]") -> str:
    """Slurm's name of this node: SLURMD_NODENAME and nothing else, for the host's own name may be another one's."""
    name = environ.get("SLURMD_NODENAME", "")
    return name if _NODE.match(name) else ""


def state_folder(wanted: str, node: str) -> "tuple[str, str]":
    """The folder for this node's state, and why it is not the wanted one ("" when it is)."""
    why = ""
    for root in (wanted, FALLBACK_STATE):
        folder = os.path.join(root, node or "unknown-node")
        try:
            files.private_folder(root)
            files.private_folder(folder)
            _try_to_write(folder)
            away = os.path.join(FALLBACK_STATE, node or "unknown-node")
            if not why and os.path.isdir(away) and away != folder:
                why = _home(away, folder)
            return folder, why
        except OSError as error:
            why = why or f"{folder}: {error.strerror or error}"
    return NOWHERE, why


def _home(away: str, folder: str) -> str:
    from . import homecoming

    try:
        homecoming.bring_home(away, folder)
    except OSError as error:
        return f"what was kept in {away} cannot be brought to {folder}: {error}"
    return ""


def _try_to_write(folder: str) -> None:
    """Raises OSError where a byte cannot be written: a full disk shows only then."""
    probe = os.path.join(folder, f".probe.{os.getpid()}")
    files.remove(probe)  # of one that was killed, and had our number
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"x")
        finally:
            os.close(fd)
    finally:
        files.remove(probe)


def load_settings(path: str) -> "dict[str, object]":
    """The compiled configuration.  Raises :class:`BadSettings` that says what is wrong with it."""
    import binascii

    why = files.distrust(path, os.geteuid())
    if why:
        raise BadSettings(why)
    settings = files.read_json(path, 16 * MOST_BYTES)
    if not settings:
        raise BadSettings(f"{path} is no JSON object")
    if settings.get("v") != VERSION:
        raise BadSettings("{} has format {!r}, not {}: run hooks check".format(path, settings.get("v"), VERSION))
    source = settings.get("source")
    if isinstance(source, str) and source and os.path.exists(source):
        try:
            crc = binascii.crc32(files.read(source, 4 * MOST_BYTES).encode())
        except OSError as error:
            raise BadSettings(f"{source}: {error.strerror}") from None
        if crc != settings.get("source_crc"):
            raise BadSettings(f"{source} was changed after it was compiled: run hooks check --write")
    return settings
