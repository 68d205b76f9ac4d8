"""Give the job back to Slurm so that it runs again in seconds, on the nodes that we want: the requeue recipe.

Run by the ending supervisor as the job's own user, once every agent is gone:

    hold → requeuehold → NumNodes, ExcNodeList, … → StartTime=now+N → release → exit before N seconds are over

*hold* first: it works on a running job and on one that the controller has requeued already, and it is refused for one
that is over.  That is the controller's own word, at that instant, on whether the job was cancelled; ``requeuehold``
does not ask and brings a cancelled job back to life.

*N* decides how long the job waits: see :mod:`slurm_resilience.slurm.begin`.

Every call is bounded and may be repeated.  Between hold and release the job carries a marker in its comment, so that
:func:`sweep` can free it if we die in between.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from slurm_resilience._clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import Cause, SlurmError
from slurm_resilience.slurm.begin import QUICK_S, begin_in_s
from slurm_resilience.slurm.cause import judge
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.failures import (
    CommandTimeout,
    ControllerUnreachable,
    JobFinished,
    JobNotPending,
    NoSuchJob,
    RequeueDisabled,
)
from slurm_resilience.slurm.nodeset import expand, fold
from slurm_resilience.slurm.records import JobRecord

_T = TypeVar("_T")
_MARK = re.compile(r" ?\[slurm-resilience requeue (?P<marker>\S*) at (?P<at>\d+)\]")
# Causes after which a job that Slurm counts as over may be queued again.  Never CANCELLED, never UNKNOWN.
_MAY_RETURN = frozenset({Cause.TIME_LIMIT, Cause.PREEMPTION, Cause.NODE_LOST})
_TRIES = 3
# A begin time that only has to hold until the real one is set.
_LONG_S = 30.0


@dataclass(frozen=True)
class Step:
    """One call of the recipe, for the event file: what was asked, what came of it, how long it took."""

    call: str
    result: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of a requeue.

    ``requeued``: the job is in the queue and released; leave before ``start_at``.  ``refused``: it must not come back, or
    cannot.  ``failed``: Slurm did not let us; ``held`` then says whether it is left in hold, with our marker, for
    :func:`sweep`.  (A job that was held while it ran is requeued and stays held: that is somebody's wish.)
    ``nodes`` and ``excluded`` are what was asked for in the end.
    """

    action: Literal["requeued", "refused", "failed"]
    reason: str
    held: bool = False
    start_at: float | None = None
    nodes: tuple[int, int] | None = None
    excluded: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def ok(self) -> bool:
        return self.action == "requeued"

    def as_fields(self) -> dict[str, Any]:
        """Plain values for an event."""
        return {
            "action": self.action,
            "reason": self.reason,
            "held": self.held,
            "start_at": self.start_at,
            "asked_nodes": list(self.nodes) if self.nodes else None,
            "excluded": list(self.excluded),
            "steps": [[step.call, step.result, round(step.seconds, 3)] for step in self.steps],
        }


def requeue(
    client: SlurmClient,
    job_id: str,
    *,
    restart_count: int,
    nodes: tuple[int, int] | None = None,
    exclude: Iterable[str] = (),
    dead: Iterable[str] = (),
    start_in_s: float | None = None,
    marker: str = "",
    patience_s: float = 30.0,
    clock: Clock = SYSTEM_CLOCK,
) -> Outcome:
    """Put run ``restart_count`` of the job back into the queue, for ``nodes`` = (fewest, most) nodes without ``exclude``.

    Only for a caller that has asked for the cause and decided; a cancelled job is refused here once more.  ``exclude`` is in
    order of suspicion; unknown names, and those without which too few nodes would be left, are dropped; what the user
    or the admin excluded stays.  ``dead`` nodes are taken out of the running job first, since a job that holds one hangs
    in COMPLETING for minutes.  ``start_in_s``: how long from now until every process of the job is surely gone and Slurm's
    epilogs are through; left out, it is chosen by what that took before, or by what the site runs there.  ``patience_s``:
    how long a controller that does not answer is asked again.  Blocks for that long at most, plus one call for each step.

    Leave at once when it returns "requeued", by ``os._exit``: the begin time may be two seconds away.

    Never raises for Slurm's failures: the outcome says what happened.
    """
    return _Recipe(client, job_id, restart_count, marker or job_id, clock.monotonic() + patience_s, clock).run(
        nodes=nodes, exclude=tuple(dict.fromkeys(exclude)), dead=frozenset(dead), start_in_s=start_in_s
    )


def sweep(client: SlurmClient, user: str, *, older_than_s: float = 30.0, clock: Clock = SYSTEM_CLOCK) -> list[str]:
    """Release that user's jobs which a requeue of ours left in hold because its process died; returns their ids.

    A hold without our marker is somebody's wish and stays; one younger than ``older_than_s`` may still be in work.
    """
    freed = []
    for record in client.pending(user):
        mark = _MARK.search(record.comment)
        if mark is None or not record.held or clock.time() - int(mark["at"]) < older_than_s:
            continue
        client.update(record.job_id, StartTime="now+2")
        client.release(record.job_id)
        client.update(record.job_id, Comment=_MARK.sub("", record.comment))
        freed.append(record.job_id)
    return freed


def marked(comment: str, marker: str, at: float) -> str:
    """The user's comment with our marker behind it, once."""
    clean = re.sub(r"\s", "-", marker)
    return f"{_MARK.sub('', comment)} [slurm-resilience requeue {clean} at {at:.0f}]".strip()


@dataclass
class _Recipe:
    client: SlurmClient
    job_id: str
    restart_count: int
    marker: str
    until: float
    clock: Clock
    steps: list[Step] = field(default_factory=list)
    holding: bool = False

    def run(
        self, *, nodes: tuple[int, int] | None, exclude: tuple[str, ...], dead: frozenset[str], start_in_s: float | None
    ) -> Outcome:
        wait_until = 0.0
        try:
            record = self._must("show job", lambda: self.client.job(self.job_id))
            cause, detail = self._judge(record)
            refusal = self._refusal(record, cause, detail)
            if refusal:
                return self._end("refused", refusal)
            self._shrink(record, dead)
            if start_in_s is None:
                settings = self._try("show config", self.client.config) or {}
                runs = self._try("sacct", lambda: self.client.history(self.job_id)) or []
                start_in_s = begin_in_s(settings, runs)
            wait_until = self._align() if start_in_s <= QUICK_S else 0.0
            self._wish("mark", Comment=marked(record.comment, self.marker, self.clock.time()))
            self._into_the_queue(record)
        except NoSuchJob as error:
            return self._give_up("refused", f"Slurm does not know the job any more ({error.evidence})")
        except JobFinished as error:
            return self._give_up("refused", f"the job was cancelled or is over ({error.evidence})")
        except SlurmError as error:
            return self._give_up("failed", str(error))
        asked, excluded = self._reshape(nodes, exclude)
        start_at = self._start_in(_LONG_S if wait_until else start_in_s)
        if record.reason.startswith("JobHeld") and not _MARK.search(record.comment):
            self._wish("unmark", Comment=_MARK.sub("", record.comment))
            return self._end("requeued", f"{detail}; somebody had held it before", held=True, nodes=asked, excluded=excluded)
        if not self._release():
            return self._end("failed", "the job is back in the queue but still held", held=True, nodes=asked, excluded=excluded)
        self._wish("unmark", Comment=_MARK.sub("", record.comment))
        if wait_until:
            self._sleep_until(wait_until)
            start_at = self._start_in(start_in_s)
        return self._end("requeued", detail, start_at=start_at, nodes=asked, excluded=excluded)

    def _refusal(self, record: JobRecord, cause: Cause, detail: str) -> str:
        """Why this run may not put the job back into the queue; "" when it may."""
        if cause is Cause.CANCELLED:
            return f"the job was cancelled and stays so ({detail})"
        if record.restarts > self.restart_count + 1 or (record.restarts > self.restart_count and not record.requeued):
            return f"a newer run of the job has begun already ({detail}); this one is a leftover"
        if record.state.ended and cause not in _MAY_RETURN:
            return f"the job is over ({detail})"
        return ""

    # -- the stations ---------------------------------------------------------------------------------------------

    def _shrink(self, record: JobRecord, dead: frozenset[str]) -> None:
        """Take dead nodes out of the running job.  Slurm cannot take out the batch host, and never grows a job back."""
        left = [name for name in record.nodes if name not in dead]
        if not record.state.running or len(left) == len(record.nodes) or not left or record.batch_host in dead:
            return
        self._wish("shrink", NodeList=fold(left))

    def _into_the_queue(self, record: JobRecord) -> None:
        """Into the queue and held there.  Raises JobFinished when the job must not return."""
        if not record.requeue:
            self._must("allow requeue", lambda: self._update(Requeue="1"))
        try:
            self._must("hold", lambda: self.client.hold(self.job_id))
            self.holding = True
        except JobFinished:  # since we looked, or at its time limit: only a new look can tell
            record = self._must("show job", lambda: self.client.job(self.job_id))
            if self._judge(record)[0] not in _MAY_RETURN or record.state.running:
                raise
        except JobNotPending:  # a release of Slurm that holds only pending jobs: ours is running, so it was not cancelled
            pass
        try:
            self._must("requeuehold", lambda: self.client.requeuehold(self.job_id))
        except RequeueDisabled:  # somebody has set Requeue=0 since we looked
            self._must("allow requeue", lambda: self._update(Requeue="1"))
            self._must("requeuehold", lambda: self.client.requeuehold(self.job_id))
        self.holding = True

    def _reshape(
        self, nodes: tuple[int, int] | None, exclude: tuple[str, ...]
    ) -> tuple[tuple[int, int] | None, tuple[str, ...]]:
        """Number of nodes, exclusions, tasks.  Each is a wish: where Slurm refuses one, the job runs without it."""
        record = self._try("show job", lambda: self.client.job(self.job_id))
        if record is None:
            return None, ()
        fewest = nodes[0] if nodes else max(1, record.num_nodes[0])
        excluded = self._affordable(record, exclude, fewest)
        if excluded != record.excluded:
            required = [name for name in record.required if name not in excluded]
            if len(required) != len(record.required):
                self._wish("ReqNodeList", ReqNodeList=fold(required))
            if not self._wish("ExcNodeList", ExcNodeList=fold(excluded)):
                excluded = record.excluded
        if nodes is None:
            return None, excluded
        # Both ends, also when they are the same: a single number changes the fewest only.  Seen on 22.05.8.
        done = self._wish("NumNodes", NumNodes=f"{nodes[0]}-{nodes[1]}")
        per_node = _tasks_per_node(record)
        if per_node:
            # A stale number of tasks would keep the old number of nodes.  An elastic job carries none: Slurm gives it as many
            # nodes as there are only then.
            self._wish("NumTasks", NumTasks=str(per_node * fewest))
        return (nodes if done else None), excluded

    def _affordable(self, record: JobRecord, exclude: tuple[str, ...], fewest: int) -> tuple[str, ...]:
        """The exclusions that exist as nodes of the partition and leave at least ``fewest`` usable ones."""
        wanted = [name for name in exclude if name not in record.excluded]
        if not wanted:
            return record.excluded
        partition = self._partition(record)
        members = self._try("expand", lambda: expand(partition.get("Nodes", ""))) or ()
        known = self._try("show node", lambda: self.client.nodes(members)) if members else None
        if not known:
            return record.excluded  # without knowing what is left, excluding could leave nothing
        excluded = list(record.excluded)
        left = {name for name, node in known.items() if node.usable and name not in excluded}
        for name in wanted:
            if name in known and len(left - {name}) >= fewest:
                excluded.append(name)
                left.discard(name)
        return tuple(excluded)

    def _start_in(self, start_in_s: float) -> float | None:
        """A begin time in the near future, and proof that Slurm took it."""
        for _ in range(_TRIES):
            set_at = self.clock.time()
            self._wish("StartTime", StartTime=f"now+{start_in_s:.0f}")
            record = self._try("show job", lambda: self.client.job(self.job_id))
            if record is not None and record.eligible_at is not None and abs(record.eligible_at - set_at - start_in_s) <= 3.0:
                return record.eligible_at
        return None

    def _align(self) -> float:
        """Wait for the end of a wall-clock second, and return when to set the begin time: at the start of the one after next.

        Slurm's begin times are whole seconds.  Set at the start of one, "now+2" leaves the job all of two seconds to complete.
        The controller's background loop runs once a second, so the first pass of the scheduler is over by then.
        """
        now = self.clock.time()
        first = math.floor(now) + 0.93
        if now % 1.0 < 0.93:
            self._sleep_until(first)
        return math.floor(first) + 2.02

    def _sleep_until(self, at: float) -> None:
        time.sleep(max(0.0, min(2.5, at - self.clock.time())))

    def _release(self) -> bool:
        for _ in range(_TRIES):
            self._try("release", lambda: self.client.release(self.job_id))
            record = self._try("show job", lambda: self.client.job(self.job_id))
            if record is not None and record.priority != 0:
                return True
        return False

    def _judge(self, record: JobRecord) -> tuple[Cause, str]:
        return judge(record, self.restart_count, now=self.clock.time(), partition=self._partition(record))

    # -- calls ----------------------------------------------------------------------------------------------------

    def _update(self, **fields: str) -> None:
        self.client.update(self.job_id, **fields)

    def _partition(self, record: JobRecord) -> Mapping[str, str]:
        return self._try("show partition", lambda: self.client.partition(record.partition)) or {}

    def _must(self, call: str, action: Callable[[], _T]) -> _T:
        """Do it, again and again while the controller does not answer and there is time.  Raises what Slurm said."""
        while True:
            started = self.clock.monotonic()
            try:
                value = action()
            except SlurmError as error:
                self.steps.append(Step(call, error.evidence or error.what, self.clock.monotonic() - started))
                if isinstance(error, (ControllerUnreachable, CommandTimeout)) and self.clock.monotonic() < self.until:
                    time.sleep(0.5)
                    continue
                raise
            self.steps.append(Step(call, "ok", self.clock.monotonic() - started))
            return value

    def _try(self, call: str, action: Callable[[], _T]) -> _T | None:
        """The same for a wish: None where Slurm refuses, which the steps keep on record."""
        try:
            return self._must(call, action)
        except SlurmError:
            return None

    def _wish(self, call: str, **fields: str) -> bool:
        """Change fields of the job if Slurm lets us."""

        def change() -> bool:
            self._update(**fields)
            return True

        return self._try(call, change) is True

    def _give_up(self, action: Literal["refused", "failed"], reason: str) -> Outcome:
        """Leave the job as it was: not held by us, not marked."""
        held = self.holding and not self._release()
        if not held:
            record = self._try("show job", lambda: self.client.job(self.job_id))
            if record is not None and _MARK.search(record.comment):
                self._wish("unmark", Comment=_MARK.sub("", record.comment))
        return self._end(action, reason, held=held)

    def _end(self, action: Literal["requeued", "refused", "failed"], reason: str, **more: Any) -> Outcome:
        return Outcome(action, reason, steps=tuple(self.steps), **more)


def _tasks_per_node(record: JobRecord) -> int:
    """The job's own --ntasks-per-node; 0 when it asked for none.  Source: ``NtasksPerN:B:S:C=2:0:*:*`` in scontrol's record."""
    first = record.fields.get("NtasksPerN:B:S:C", "0").partition(":")[0]
    return int(first) if first.isdigit() else 0
