"""The checks: one module, one question.  Each has NAME, CONTEXTS, TIMEOUT_S, SEVERITY and check(host) -> Result.

A check never acts on Slurm, never sleeps, and answers "unknown" to whatever it does not understand.
"""

import os
import time

from .. import child, files

OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"
NODE, JOB, FABRIC, NOBODY = "node", "job", "fabric", "unknown"  # whom the failure is blamed on
FLAG, DRAIN_AFTER, DRAIN_NOW = "flag", "drain", "drain_now"
ALL = (
    "clock", "cpu", "dcgm", "filesystem", "gpu", "gpu_memory", "gpu_strangers", "infiniband", "leftovers", "lockups", "memory",
    "memory_errors", "nvlink", "oom", "pcie", "services", "tmpfiles", "xid",
)  # fmt: skip


class Result:
    """One check's answer.  ``word`` and ``where`` go into the first characters of a drain reason, ``text`` to the human."""

    def __init__(
        self,
        status: str,
        text: str = "",
        word: str = "",
        where: str = "",
        blame: str = NODE,
        severity: str = "",
        check: str = "",
    ) -> None:
        self.status = status
        self.text = text
        self.word = word
        self.where = where
        self.blame = blame
        self.severity = severity  # "" for the check's own
        self.check = check
        self.took_s = 0.0  # measured where it runs

    def to_dict(self) -> "dict[str, object]":
        return {name: getattr(self, name) for name in ("status", "text", "word", "where", "blame", "severity", "check")}

    @classmethod
    def from_dict(cls, value: "dict[str, object]") -> "Result":
        """Raises ValueError for what is no result."""
        if value.get("status") not in (OK, WARN, FAIL, UNKNOWN):
            raise ValueError("no such status: {!r}".format(value.get("status")))
        names = ("status", "text", "word", "where", "blame", "severity", "check")
        return cls(**{name: str(value.get(name, "")) for name in names})


class Host:
    """The machine as a check sees it.  ``root`` puts a recorded /proc, /sys and kernel log in the place of the real ones."""

    def __init__(
        self,
        options: "dict[str, object]",
        deadline: float,
        root: str = "",
        node: str = "",
        job: object = None,
        memo: str = "",
        env: "dict[str, str] | None" = None,
    ) -> None:
        self.options = options
        self.deadline = deadline
        self.root = root
        self.node = node
        self.job = job
        self.env = env  # for tools that speak to Slurm
        self.memo_path = memo  # what this check remembers from one run to the next; root's only

    def path(self, path: str) -> str:
        return self.root + path

    def read(self, path: str, cap_bytes: int = 4 << 20) -> str:
        """A file of the machine; "" where there is none."""
        try:
            return files.read(self.path(path), cap_bytes)
        except OSError:
            return ""

    def names(self, path: str) -> "list[str]":
        """What is in a folder of the machine, sorted; [] where there is none."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def tool(self, option: str, default: str, *words: str) -> child.Finished:
        """Run a tool by the absolute path that the configuration gives; it always ends before the check's own time does."""
        path = str(self.options.get(option, default))
        return child.run((path, *words), max(0.1, self.deadline - time.monotonic() - 0.3), self.env)

    def number(self, option: str, default: float) -> float:
        found = self.options.get(option, default)
        return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else default

    def memo(self) -> "dict[str, object]":
        return files.read_json(self.memo_path) if self.memo_path else {}

    def remember(self, memo: "dict[str, object]") -> None:
        if self.memo_path:
            files.write_json(self.memo_path, memo)


def unknown(text: str) -> Result:
    return Result(UNKNOWN, text, blame=NOBODY)


def module(name: str) -> object:
    """The check's module, loaded when it is asked for.  Raises ImportError."""
    if name not in ALL:
        raise ImportError(f"no check of the name {name!r}")
    return __import__(f"{__name__}.{name}", fromlist=["check"])
