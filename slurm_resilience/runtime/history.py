"""What has happened to this run so far, as far as decisions depend on it: a fold over its events.

The same fold serves a supervisor that has just written an event and one that was restarted and reads the file, so
a budget cannot be escaped by dying.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_resilience.runtime.suspects import speaks_of_node, suspects

# Ends that the ranks had no part in.  SIGKILL comes from an administrator or from the kernel's memory killer, and nobody
# can tell which: the checkpoint store believes it only so often.
_FROM_OUTSIDE = frozenset({"node_lost", "node_drained", "launch_failed", "preemption", "time_limit", "cancelled", "unknown"})
_EXCUSES_KEPT = 20
# What a supervisor says when it ends by itself.
_LAST_WORDS = frozenset({"requeue_done", "run_failed", "run_completed", "job_ended_for_batch_host"})


@dataclass(frozen=True)
class Fault:
    """The end of an attempt that was not asked for.

    ``signature`` names the exception that started it (type, message, step), "" where there was none of the user's own.
    """

    attempt: int
    cause: str
    node: str
    signature: str


@dataclass
class History:
    """Counts since the last progress.  Progress is a committed checkpoint that is newer than any before.

    ``excused``: attempts that something outside their ranks ended; a checkpoint that they were loading is not to blame.
    ``mesh``: that of the last attempt, over all allocations; None before the first.  ``present``: nodes with an agent.
    ``crashes``: how many faults began on each node since its last boot, whatever progress there was.  ``failed_check``: node →
    what the last check of it found.  ``unexplained``: faults that a node may be to blame for, since progress or a check.
    """

    best_step: int = -1
    progress: int = 0
    faults: list[Fault] = field(default_factory=list)
    excused: list[int] = field(default_factory=list)
    goes_back: bool = False  # the last attempt condemned the checkpoint that it had resumed from: the next takes an older one
    unexplained: int = 0
    _vain_limits: int = 0
    _progress_before: int = 0
    _spoke: bool = False
    _resumed: bool = False
    supervisor_restarts: int = 0
    job_id: str = ""
    restart: int = -1
    failed: bool = False
    _unended: bool = False
    _last_t: float = 0.0
    open_attempt: Mapping[str, Any] | None = None
    mesh: Mapping[str, int] | None = None
    present: set[str] = field(default_factory=set)
    crashes: Counter[str] = field(default_factory=Counter)
    failed_check: dict[str, str] = field(default_factory=dict)
    boots: dict[str, str] = field(default_factory=dict)
    silences: dict[int, dict[str, float]] = field(default_factory=dict)
    _pretend: bool = False  # its nodes are names for one machine

    @classmethod
    def replay(cls, events: Iterable[Mapping[str, Any]]) -> History:
        """The history in an event file."""
        history = cls()
        for event in events:
            history.apply(event)
        return history

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one more event into account; unknown kinds change nothing."""
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)
        if event["event"] in _LAST_WORDS:
            self._unended = False
        self._last_t = max(self._last_t, float(event.get("t") or 0.0))

    def count(self, cause: str) -> int:
        """How often ``cause`` has ended an attempt since the last progress."""
        return Counter(fault.cause for fault in self.faults)[cause]

    @property
    def vain_limits(self) -> int:
        """How many allocations in a row, this one too, have brought no progress, if it is its time limit that ends this one.

        Only those count in which ranks told where they begin.  Of a script without a Run nobody knows what it saves.
        """
        return self._vain_limits + (self._spoke and self.progress == self._progress_before)

    @property
    def lost(self) -> dict[str, Any] | None:
        """The last allocation, as long as its supervisor has not said how it ended."""
        if not self._unended:
            return None
        return {"job_id": self.job_id, "of_restart": self.restart, "last_word": round(self._last_t, 3)}

    @property
    def suspects(self) -> dict[str, str]:
        """Node → why it had better be left out.  No crash speaks against pretend nodes: they are one machine."""
        return {**({} if self._pretend else suspects(self.crashes)), **self.failed_check}

    @property
    def pretends(self) -> bool:
        """All nodes are names for one machine."""
        return self._pretend

    def same_signature(self) -> int:
        """How many of the last faults in a row, all without progress in between, began with the same exception."""
        last = self.faults[-1].signature if self.faults else ""
        run = 0
        for fault in reversed(self.faults):
            if not last or fault.signature != last:
                break
            run += 1
        return run

    def _on_checkpoint_committed(self, event: Mapping[str, Any]) -> None:
        step = event.get("step")
        if isinstance(step, int) and step > self.best_step:
            self.best_step = step
            self.progress += 1
            self._forgive()

    def _on_attempt_started(self, event: Mapping[str, Any]) -> None:
        self._abandon()
        self.open_attempt = event
        self.goes_back = self._resumed = False
        mesh = (event.get("plan") or {}).get("mesh")
        self.mesh = mesh if isinstance(mesh, Mapping) else self.mesh

    def _on_resumed(self, event: Mapping[str, Any]) -> None:
        self._resumed = self._spoke = True

    def _on_started_fresh(self, event: Mapping[str, Any]) -> None:
        self._spoke = True

    def _on_checkpoint_quarantined(self, event: Mapping[str, Any]) -> None:
        self.goes_back = self._resumed

    def _on_attempt_stopped(self, event: Mapping[str, Any]) -> None:
        self.open_attempt = None
        fault = bool(event.get("fault")) and not event.get("by_hand")  # who moves a run spends none of its budgets
        if not fault or event.get("cause") in _FROM_OUTSIDE or event.get("signal") == "SIGKILL":
            self._excuse(event)
        if fault:
            cause, node, signature = (str(event.get(key, "")) for key in ("cause", "node", "signature"))
            speaks = speaks_of_node(cause, signature)
            if node and speaks:
                self.crashes[node] += 1
            # Whoever sends SIGKILL is no fault of the node's.
            self.unexplained += (speaks or cause == "unknown") and event.get("signal") != "SIGKILL"
            self.faults.append(Fault(int(event["attempt"]), cause, node, signature))

    def _on_allocation_started(self, event: Mapping[str, Any]) -> None:
        job_id = str(event.get("job_id", ""))
        if self.failed and job_id != self.job_id:
            # Somebody has seen the failure and submitted the run again.  A requeue of the same job may be RequeueExit's
            # doing, with nobody looking, and forgives nothing.
            self._forgive()
        self.failed = False
        self._progress_before, self._spoke = self.progress, False
        self.present.clear()
        self.job_id, self._pretend = job_id, job_id == "local"
        self.restart = int(event.get("restart", 0))
        self._unended = True
        self._abandon()

    def _on_decided(self, event: Mapping[str, Any]) -> None:
        if event.get("action") == "requeue" and event.get("cause") == "time_limit":
            self._vain_limits = self.vain_limits

    def _on_agent_joined(self, event: Mapping[str, Any]) -> None:
        node, boot = str(event.get("node", "")), str(event.get("boot_id", ""))
        self.present.add(node)
        if boot and self.boots.get(node, boot) != boot:
            del self.crashes[node]  # what was said of it before it was started again
            self.failed_check.pop(node, None)
        self.boots[node] = boot

    def _on_agent_lost(self, event: Mapping[str, Any]) -> None:
        self.present.discard(str(event.get("node", "")))

    def _on_node_forgiven(self, event: Mapping[str, Any]) -> None:
        self.crashes.pop(str(event.get("node", "")), None)
        self.failed_check.pop(str(event.get("node", "")), None)

    def _on_node_check_done(self, event: Mapping[str, Any]) -> None:
        self.unexplained = 0
        if not event.get("inconclusive"):
            for node in event.get("nodes") or ():
                self.failed_check.pop(str(node), None)
            self.failed_check.update({str(node): str(why) for node, why in dict(event.get("suspects") or {}).items()})

    def _on_supervisor_took_over(self, event: Mapping[str, Any]) -> None:
        self.supervisor_restarts += 1

    def _on_limits_set(self, event: Mapping[str, Any]) -> None:
        """How long ranks were silent at most in each kind of work, by the size of the world."""
        self.silences[int(event["world"])] = {str(name): float(value) for name, value in dict(event.get("seen") or {}).items()}

    def _on_supervisor_restarted(self, event: Mapping[str, Any]) -> None:
        self.supervisor_restarts += 1

    def _on_run_failed(self, event: Mapping[str, Any]) -> None:
        self.failed = True

    def _abandon(self) -> None:
        """An attempt whose end nobody saw went down with its supervisor or its allocation."""
        if self.open_attempt is not None:
            self._excuse(self.open_attempt)
        self.open_attempt = None

    def _excuse(self, event: Mapping[str, Any]) -> None:
        self.excused = [*self.excused, int(event["attempt"])][-_EXCUSES_KEPT:]

    def _forgive(self) -> None:
        self._vain_limits = 0
        self.faults.clear()
        self.unexplained = 0
        self.supervisor_restarts = 0
