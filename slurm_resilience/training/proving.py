"""What does a run know of itself that a restored state must agree with, and who watches its first steps?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import ConfigError
from slurm_resilience.training.data import Batches, Micro, Source
from slurm_resilience.training.first_steps import FirstSteps
from slurm_resilience.training.guard import Guard, Trouble
from slurm_resilience.training.identity import Identity
from slurm_resilience.training.metrics import Log, MetricsFile
from slurm_resilience.training.recompute import Recompute
from slurm_resilience.training.resume import Resumed
from slurm_resilience.training.saving import Saver
from slurm_resilience.training.state import Registry
from slurm_resilience.training.track import Rows, watched
from slurm_resilience.training.verify import CheckFn, OwnRun

# A resume looks this far back in the run's log; 64 KiB are some 500 steps.
TAIL_BYTES = 8 << 20


class Proving(Identity):
    """The side of a ``Run`` that compares a restored state with the run's own log."""

    _registry: Registry
    _batches: dict[str, Source]

    def __init__(self, folder: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, settings)
        self._checks: list[CheckFn] = []
        self._recompute: Recompute | None = None
        self._log = Log()

    def verify_with(self, check: CheckFn) -> None:
        """A check of one's own after loading: ``check(restored)`` yields ``Check`` values; all ranks call it alike.

        One that failed condemns the checkpoint, and an older one is taken.
        """
        self._checks.append(check)

    def recompute_with(self, fn: Callable[[Micro], Any], batches: Batches) -> None:
        """How the loss of one micro-batch of ``batches`` is computed: ``fn(micro)``, as the loop does before ``scale_loss``.

        After loading it gives the next step's loss, for comparison with the log; with ``verify.recompute_every_steps`` ranks
        check each other's work with it.  It must give what :meth:`report` calls ``loss`` when weighted over all ranks, and draw
        nothing from a loader.  Raises ConfigError for data that cannot be read ahead of time.
        """
        node = self._contract.node if self._contract else ""
        self._recompute = Recompute(fn, batches, self._world, seed=self.seed, node=node)

    def _read_own_log(self) -> OwnRun:
        """Who this run is, by its log, to which only rank 0 listens.  All ranks must come."""
        leads = self._world.rank == 0
        if leads:
            self._log = Log.read(self._folder, got_over_after=self._settings.verify.first_steps, tail_bytes=TAIL_BYTES)
        known = self._world.team.funnel(
            "reading the run's log",
            lambda: None,
            lambda _: (
                sorted(self._log.began_from),
                bool(self._log.taken),
                {s: watched(r) for s, r in self._log.taken.items()},
            ),
        )
        relatives, trained, taken = known
        self._taken: Rows = taken
        return OwnRun(self._run_id, self._attempt, frozenset(relatives), trained)

    def _write_resume_down(self, resumed: Resumed, own: OwnRun, metrics: MetricsFile | None) -> None:
        """Take back what the log says past the step that was gone back to, and remember whose state this was."""
        if metrics is None:
            return
        if resumed.rejected:
            metrics.remark("rolled_back", to=resumed.step, attempt=self._attempt)
        whose = (resumed.saved.get("witness") or {}).get("run", self._run_id)
        if whose not in own.relatives | {own.run_id}:
            metrics.remark("began_from", run=whose, attempt=self._attempt)

    def _watch_first_steps(
        self, resumed: Resumed, store: CheckpointStore, saver: Saver, metrics: MetricsFile | None, by: str
    ) -> FirstSteps:
        """The guard over the steps that follow."""
        history = {int(step): watched(row) for step, row in resumed.saved.get("history") or ()}
        logged = {step: watched(line) for step, line in self._log.taken.items()}
        guard = Guard(
            resumed.step,
            {step: row for step, row in {**history, **logged}.items() if step <= resumed.step},
            {step: row for step, row in logged.items() if step > resumed.step},
            self._settings.verify,
            exact=resumed.rng == "exact",
            scaled=any(callable(getattr(one, "get_scale", None)) for one in self._registry.others.values()),
            earlier=[Trouble.from_json(note) for note in self._log.trouble],
        )
        return FirstSteps(
            world=self._world,
            link=self._link,
            store=store,
            metrics=metrics,
            guard=guard,
            entry=resumed.entry,
            attempt=self._attempt,
            by=by,
            give_up=saver.give_up,
        )

    def _let_ranks_check_each_other(self) -> Callable[[int], None] | None:
        """What is done before a step, where the configuration asks for it."""
        every, recompute = self._settings.verify.recompute_every_steps, self._recompute
        if every is None:
            return None
        if recompute is None:
            raise ConfigError(
                f"verify.recompute_every_steps={every} needs to know how a loss is computed",
                evidence="run.recompute_with() was not called before run.resume()",
                remedy="run.recompute_with(lambda micro: …, batches), or leave the key out",
            )

        def check(step: int) -> None:
            if step % every:
                return
            suspicion = recompute.compare(step, list(self._registry.models.values()))
            if suspicion is not None and self._world.rank == 0:
                self._link.send(
                    "node_suspected", step=step, nodes=list(suspicion.nodes), ranks=list(suspicion.ranks), why=suspicion.why
                )

        return check
