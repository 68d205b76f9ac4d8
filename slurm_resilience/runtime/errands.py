"""The one thread that talks to Slurm for the supervisor: every question may block, and none may block the loop."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_resilience.errors import SlurmError
from slurm_resilience.runtime.inputs import AskSlurm, Input, LookAtNodes, NodesSeen, Requeue, RequeueEnded, SlurmSaid
from slurm_resilience.runtime.requeue import Outcome, requeue
from slurm_resilience.runtime.resubmit import resubmit
from slurm_resilience.slurm.cause import ask_cause
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.reservations import next_maintenance

_ASK_PATIENCE_S = 3.0
# A wish that is no file: Slurm itself requeues what ends with our code (RequeueExit).
BY_EXIT_CODE = "exit-code"


class Errands(threading.Thread):
    """Runs one errand after the other and gives the result to ``answer``, which is called from this thread."""

    def __init__(
        self,
        client: SlurmClient,
        *,
        job_id: str,
        restart: int,
        nodes: tuple[str, ...],
        run_id: str,
        lead_s: float,
        config: Mapping[str, str],
        answer: Callable[[Input], None],
        run_dir: Path | None = None,
        requeue_wish: str = "",
    ) -> None:
        super().__init__(name="errands", daemon=True)
        self._client, self._job_id, self._restart, self._nodes = client, job_id, restart, nodes
        self._run_dir, self._requeue_wish = run_dir, requeue_wish
        self._run_id, self._lead_s, self._config, self._answer = run_id, lead_s, config, answer
        self._todo: queue.SimpleQueue[AskSlurm | Requeue] = queue.SimpleQueue()

    def put(self, errand: AskSlurm | LookAtNodes | Requeue) -> None:
        """Have it done.  Returns at once.  A look at the nodes never makes a question about a warning wait."""
        if isinstance(errand, LookAtNodes):
            threading.Thread(target=lambda: self._answer(self._look(errand)), name="look at nodes", daemon=True).start()
        else:
            self._todo.put(errand)

    def run(self) -> None:
        while True:
            errand = self._todo.get()
            self._answer(self._ask(errand) if isinstance(errand, AskSlurm) else self._requeue(errand))

    def _ask(self, errand: AskSlurm) -> SlurmSaid:
        verdict = ask_cause(
            self._client,
            self._job_id,
            self._restart,
            heard_at=errand.heard_at,
            my_nodes=self._nodes,
            lead_s=self._lead_s,
            patience_s=_ASK_PATIENCE_S,
            config=self._config,
        )
        return SlurmSaid(verdict)

    def _look(self, errand: LookAtNodes) -> NodesSeen:
        """Two cheap questions; two more only when a node is drained."""
        try:
            mine = self._client.nodes(errand.names)
            drained = {name: node.reason for name, node in mine.items() if node.drained}
            untold = frozenset(errand.names) - mine.keys()
            maintenance = next_maintenance(
                self._client.reservations(), errand.names, now=time.time(), own=os.environ.get("SLURM_JOB_RESERVATION", "")
            )
            at = maintenance.start_at if maintenance is not None else None
            if not mine or not drained:
                return NodesSeen({}, known=bool(mine), maintenance_at=at, untold=untold)
        except SlurmError:
            return NodesSeen({}, known=False)
        try:
            partition = self._client.job(self._job_id).partition
            others = [node for node in self._client.nodes().values() if node.name not in self._nodes and node.usable]
            room = sum(partition in node.fields.get("Partitions", "").split(",") for node in others)
        except SlurmError:
            return NodesSeen(drained, maintenance_at=at, untold=untold)
        return NodesSeen(drained, room=room, maintenance_at=at, untold=untold)

    def _requeue(self, errand: Requeue) -> RequeueEnded:
        if self._requeue_wish:
            return self._by_script(self._requeue_wish)
        outcome = requeue(
            self._client,
            self._job_id,
            restart_count=self._restart,
            nodes=errand.nodes,
            exclude=[*self._not_back(errand.lost), *errand.suspects],
            dead=errand.lost,
            marker=self._run_id,
        )
        if outcome.action == "failed" and not outcome.held and self._run_dir is not None:
            return self._in_a_new_job(errand, outcome, self._run_dir)
        return RequeueEnded(outcome.ok, outcome.reason, outcome.as_fields())

    def _by_script(self, wish: str) -> RequeueEnded:
        """There is no scontrol here; the batch script, which has one, looks for this file when we have ended."""
        if wish == BY_EXIT_CODE:
            reason = "there is no scontrol here: Slurm puts a job back that ends with this code (RequeueExit)"
            return RequeueEnded(True, reason, {"action": "requeued", "reason": reason})
        try:
            Path(wish).touch()
        except OSError as error:
            reason = f"the batch script could not be asked to put the job back: {error}"
            return RequeueEnded(False, reason, {"action": "failed", "reason": reason})
        reason = "there is no scontrol here: the batch script puts the job back"
        return RequeueEnded(True, reason, {"action": "requeued", "reason": reason})

    def _in_a_new_job(self, errand: Requeue, outcome: Outcome, run_dir: Path) -> RequeueEnded:
        """Slurm did not let this one come back, and it is not in the queue."""
        try:
            record = self._client.job(self._job_id)
            if record.state.waiting or record.requeued or record.restarts > self._restart:
                return RequeueEnded(True, outcome.reason, outcome.as_fields())  # it is, after all
            job_id = resubmit(
                self._client, record, run_dir, nodes=errand.nodes, exclude=(*self._not_back(errand.lost), *errand.suspects)
            )
        except SlurmError as error:
            reason = f"{outcome.reason}; nor could it be submitted again: {error}"
            return RequeueEnded(False, reason, outcome.as_fields())
        reason = f"the run goes on in job {job_id} ({outcome.reason})"
        return RequeueEnded(True, reason, {**outcome.as_fields(), "action": "resubmitted", "reason": reason, "job": job_id})

    def _not_back(self, lost: Mapping[str, float]) -> list[str]:
        """The lost nodes that Slurm does not know to have been started again since.

        Slurm takes SlurmdTimeout (300 s by default) to notice a silent node, and would give it to us again until then.
        """
        if not lost:
            return []
        try:
            known = self._client.nodes(lost)
        except SlurmError:
            known = {}
        out = []
        for name, since in lost.items():
            node = known.get(name)
            back = node is not None and node.usable and node.boot_at is not None and node.boot_at > since
            if not back:
                out.append(name)
        return out
