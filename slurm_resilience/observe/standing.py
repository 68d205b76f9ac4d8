"""How does a run stand?  What it does now, on which nodes, how far it is: a fold over its events.

Nothing is asked of Slurm or of the nodes, so it works from any machine that sees the run folder, also when nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resilience.errors import Cause
from slurm_resilience.observe.decisions import left_out
from slurm_resilience.observe.duration import short
from slurm_resilience.observe.endings import ending
from slurm_resilience.observe.failures import word_of
from slurm_resilience.observe.incidents import Incident, Incidents

_Event = Mapping[str, Any]
_PULSE = "pulse"  # rewritten every second; see runtime/epochs.py
# From here on its silence is worth a word.  Clocks may differ by a little.
_SILENT_S = 4.0
# In Slurm a batch script restarts a supervisor, and a node takes its place, well before; elsewhere nobody does.
_NO_PULSE_S = 30.0
_NO_PULSE_LOCAL_S = 10.0
_LOCAL = "local"


@dataclass
class NodeStanding:
    """One node of the allocation.  ``agent``: awaited, here, warm, lost or gone; ``why`` where it is not well."""

    name: str
    agent: str = "awaited"
    why: str = ""
    in_attempt: bool = False


@dataclass
class Checkpoint:
    """A committed checkpoint, as its event says."""

    step: int | None
    name: str
    t: float
    seconds: float | None = None
    bytes: int | None = None


@dataclass
class Standing:
    """Where a run is.  Times are wall-clock seconds; ``None`` is "nobody has said so".

    ``doing`` is one of queued, starting, launching, loading, training, saving, stopping, deciding, requeueing, complete,
    failed, and unsupervised (see :func:`look_for_supervisor`); ``because`` is the sentence that goes with it, ``since`` when it
    began, where training goes on through its checkpoints.  ``ended_by``: the cause of an end that was not the end of the work.
    ``pids``: rank → its process on its node, of the last launch.
    ``silent_s``: how long the supervisor has shown no sign, None where it does, or where nobody can tell.
    """

    run_id: str = ""
    argv: tuple[str, ...] = ()
    job_id: str = ""
    restart: int = 0
    attempt: int = 0
    world: int = 0
    doing: str = "queued"
    because: str = "no supervisor has written anything yet"
    since: float | None = None
    began_at: float | None = None
    last_event_at: float | None = None
    step: int | None = None
    step_at: float | None = None
    loss: float | None = None
    step_s: float | None = None
    resumed_from: str = ""
    nodes: dict[str, NodeStanding] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    committed: int = 0
    newest: Checkpoint | None = None
    quarantined: list[tuple[str, str]] = field(default_factory=list)
    failed_saves: int = 0
    exit_code: int | None = None
    ended_by: str = ""
    silent_s: float | None = None
    incidents: list[Incident] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Nothing more will happen by itself."""
        return self.doing in ("complete", "failed")

    @property
    def cancelled(self) -> bool:
        """Somebody ended it on purpose."""
        return self.doing == "failed" and self.ended_by == Cause.CANCELLED.value

    @property
    def local(self) -> bool:
        """It has no Slurm job: nobody but its user starts it again."""
        return self.job_id in ("", _LOCAL)

    @classmethod
    def of(cls, events: Iterable[_Event]) -> Standing:
        """The standing after all of ``events``."""
        fold = Observer()
        for event in events:
            fold.apply(event)
        return fold.standing


def look_for_supervisor(standing: Standing, folder: Path, *, now: float) -> None:
    """Say how long a run that is neither over nor queued has had no sign of its supervisor, and when nobody looks after it.

    Events alone cannot tell: one that was killed writes no more of them.  The acting supervisor rewrites RUN_DIR/pulse every
    second; a run without that file is left as it is.  ``now``: wall-clock seconds.
    """
    if standing.over or standing.doing == "queued":
        return
    try:
        beat_at = (folder / _PULSE).stat().st_mtime
    except OSError:
        return
    silent_s = now - beat_at
    if silent_s < _SILENT_S:
        return
    standing.silent_s = silent_s
    again = "start the same command again, and it goes on from its newest checkpoint"
    if silent_s < (_NO_PULSE_LOCAL_S if standing.local else _NO_PULSE_S):
        step = again if standing.local else "its batch script starts another one, or a node takes its place"
        standing.because += f"; no sign of its supervisor for {short(silent_s)}: if it is dead, {step}"
        return
    before = f"{standing.doing}, {standing.because}"
    remedy = again if standing.local else "where its job is over, submit again with the same --run-dir"
    standing.because = f"no sign of its supervisor for {short(silent_s)}, it ended without a word ({before}); {remedy}"
    standing.doing, standing.since = "unsupervised", beat_at


class Observer:
    """Keeps a :class:`Standing` up to date, event by event; kinds that it does not know change nothing."""

    def __init__(self) -> None:
        self.standing = Standing()
        self._incidents = Incidents()
        self._first: tuple[float, int] | None = None
        self._trains_since: float | None = None
        self._left_out: dict[str, str] = {}
        self._load_s: float | None = None
        self._warned = ""
        self.standing.incidents = self._incidents.all

    def apply(self, event: _Event) -> None:
        """Take one more event into account."""
        now = self.standing
        self._incidents.apply(event)
        now.last_event_at = max(float(event["t"]), now.last_event_at or 0.0)
        now.restart = int(event.get("restart", now.restart))
        now.attempt = max(now.attempt, int(event.get("attempt") or 0))
        handler = getattr(self, f"_{event['event']}", None)
        if handler is not None:
            handler(event)

    def _do(self, event: _Event, doing: str, because: str) -> None:
        saved = self.standing.doing == "saving" and doing == "training"
        if self.standing.doing != doing:
            self.standing.since = self._trains_since if saved else float(event["t"])
        if doing == "training":
            self._trains_since = self.standing.since
        self.standing.doing, self.standing.because = doing, because

    def _node(self, name: Any, agent: str, why: Any = "") -> None:
        node = self.standing.nodes.setdefault(str(name), NodeStanding(str(name)))
        node.agent, node.why = agent, str(why or "")

    # --- the run and its allocations -----------------------------------------------------------------------------------

    def _run_started(self, event: _Event) -> None:
        self.standing.run_id = str(event.get("run_id", ""))
        self.standing.argv = tuple(map(str, event.get("argv") or ()))
        self.standing.began_at = float(event["t"])

    def _allocation_started(self, event: _Event) -> None:
        now = self.standing
        now.job_id = str(event.get("job_id") or "")
        now.nodes = {str(name): NodeStanding(str(name)) for name in event.get("nodes") or ()}
        now.world, now.exit_code, now.ended_by = 0, None, ""
        self._do(event, "starting", f"waiting for the agents of {_count(len(now.nodes), 'node')}")

    def _supervisor_restarted(self, event: _Event) -> None:
        self._do(event, "starting", "its supervisor was restarted and waits for the agents to call")

    def _supervisor_took_over(self, event: _Event) -> None:
        self._do(event, "starting", "its supervisor was lost with its node; another node's waits for the agents to call")

    def _run_completed(self, event: _Event) -> None:
        self.standing.step = event.get("step", self.standing.step)
        self.standing.exit_code = 0
        self._do(event, "complete", "every rank has reached the end of its work")

    def _run_failed(self, event: _Event) -> None:
        self.standing.exit_code, self.standing.ended_by = event.get("exit_code"), str(event.get("cause") or "")
        self._do(event, "failed", ending(event))

    # --- nodes ---------------------------------------------------------------------------------------------------------

    def _agent_joined(self, event: _Event) -> None:
        self._node(event["node"], "warm" if event.get("warm") else "here", "" if event.get("warm") else event.get("reason"))

    def _agent_warm(self, event: _Event) -> None:
        self._node(event["node"], "warm" if event.get("warm") else "here", event.get("reason"))

    def _agent_lost(self, event: _Event) -> None:
        self._node(event["node"], "lost", event.get("why"))

    def _agent_start_failed(self, event: _Event) -> None:
        self._node(event["node"], "lost", event.get("detail"))

    def _node_gone(self, event: _Event) -> None:
        self._node(event["node"], "gone", event.get("why"))

    # --- attempts ------------------------------------------------------------------------------------------------------

    def _attempt_started(self, event: _Event) -> None:
        self._warned = ""
        now, names = self.standing, {str(name) for name in event.get("nodes") or ()}
        now.world, now.plan = int(event.get("world") or 0), event.get("plan") or {}
        for name in names:
            now.nodes.setdefault(name, NodeStanding(name))
        left = {**self._left_out, **(now.plan.get("left_out") or {})}
        for node in now.nodes.values():
            node.in_attempt = node.name in names
            if node.agent in ("here", "warm"):  # else its agent is the reason
                node.why = "" if node.in_attempt else str(left.get(node.name, ""))
        self._first, now.pids = None, {}
        self._do(event, "launching", f"starting {_count(now.world, 'rank')} on {_count(len(names), 'node')}")

    def _watched_from_outside(self, event: _Event) -> None:
        if self.standing.doing == "loading":
            self._do(
                event, "training", "as far as can be seen from outside: the script has no Run, and says nothing of its steps"
            )

    def _attempt_adopted(self, event: _Event) -> None:
        self._do(event, "training", "the ranks had gone on while the supervisor was away")

    def _ranks_launched(self, event: _Event) -> None:
        launched = event.get("pids") or {}
        self.standing.pids = {int(rank): int(pid) for node in launched.values() for rank, pid in node.items()}
        before = f"; the last load took {short(self._load_s)}" if self._load_s is not None else ""
        self._do(event, "loading", f"the ranks set up and look for a checkpoint{before}")

    def _resumed(self, event: _Event) -> None:
        self.standing.resumed_from = str(event.get("checkpoint") or "")
        self._load_s = float(event["seconds"]) if isinstance(event.get("seconds"), int | float) else self._load_s
        self._step(event)
        self._do(event, "loading", f"{self.standing.resumed_from} is loaded; waiting for the first step")

    def _started_fresh(self, event: _Event) -> None:
        self.standing.resumed_from = ""
        self._do(event, "loading", "there was no checkpoint; waiting for the first step")

    def _first_step(self, event: _Event) -> None:
        self._step(event)
        self._do(event, "training", f"on {_count(self.standing.world, 'rank')}")

    def _step_reported(self, event: _Event) -> None:
        self._step(event)

    def _step(self, event: _Event) -> None:
        step, now, t = event.get("step"), self.standing, float(event["t"])
        if not isinstance(step, int):
            return
        if event["event"] != "resumed":
            if self._first is None:
                self._first = (t, step)
            elif step > self._first[1]:
                now.step_s = (t - self._first[0]) / (step - self._first[1])
        now.step, now.step_at = step, t
        if isinstance(event.get("loss"), int | float):
            now.loss = float(event["loss"])

    def _stopped(self, event: _Event) -> None:
        self._step(event)
        self._do(event, "stopping", "every rank has ended, as it was asked to; the same command again goes on from there")

    def _attempt_stopped(self, event: _Event) -> None:
        self._do(event, "deciding", f"attempt {event.get('attempt')} has stopped: {word_of(event)}")

    def _fault_detected(self, event: _Event) -> None:
        where = f" on {event['node']}" if event.get("node") else ""
        self._do(event, "stopping", f"{event.get('cause')}{where}: {event.get('detail', '')}")

    def _warning_received(self, event: _Event) -> None:
        self._do(event, "stopping", f"{event.get('signal')} came; the ranks save and end")

    def _warning_explained(self, event: _Event) -> None:
        self._warned = f"{word_of(event)} ({event.get('detail')})"
        self._do(event, "stopping", f"{self._warned}; the ranks save and end")

    def _decided(self, event: _Event) -> None:
        self._left_out = left_out(str(event.get("reason", "")))
        doing = {"requeue": "requeueing", "wait": "deciding", "stop": "stopping"}.get(str(event.get("action")))
        if doing is not None:
            self._do(event, doing, str(event.get("reason", "")))

    def _requeue_started(self, event: _Event) -> None:
        self._do(event, "requeueing", "Slurm is asked for a new allocation")

    def _requeue_done(self, event: _Event) -> None:
        why = f": {self._warned}" if self._warned else ""
        self._do(event, "queued", f"Slurm has the job back in its queue{why}")

    def _requeue_failed(self, event: _Event) -> None:
        self._do(event, "requeueing", f"Slurm did not requeue the job: {event.get('reason')}")

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def _checkpoint_started(self, event: _Event) -> None:
        if self.standing.doing == "training":
            self._do(event, "saving", f"the checkpoint of step {event.get('step')}")

    def _checkpoint_committed(self, event: _Event) -> None:
        now, again = self.standing, self.standing.newest
        if again is None or not event.get("name") or again.name != event["name"]:  # a new supervisor may be told again
            now.committed += 1
        now.newest = Checkpoint(
            event.get("step"), str(event.get("name", "")), float(event["t"]), event.get("seconds"), event.get("bytes")
        )
        self._saved(event)

    def _checkpoint_failed(self, event: _Event) -> None:
        self.standing.failed_saves += 1
        self._saved(event)

    def _saved(self, event: _Event) -> None:
        if self.standing.doing == "saving":
            self._do(event, "training", f"on {_count(self.standing.world, 'rank')}")

    def _checkpoint_quarantined(self, event: _Event) -> None:
        self.standing.quarantined.append((str(event.get("name", "")), str(event.get("reason", ""))))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
