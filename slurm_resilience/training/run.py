"""``Run``: what a training script holds in its hands; examples/minimal.py shows the twelve lines that it adds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn

import torch

from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.elastic.batch import Deal, LossOf
from slurm_resilience.errors import ConfigError, ResilienceError
from slurm_resilience.progress.page import Phase
from slurm_resilience.training import alike, data, gradients, loading, offline
from slurm_resilience.training.crash import CrashReporter
from slurm_resilience.training.keeping import Keeping
from slurm_resilience.training.metrics import MetricsFile
from slurm_resilience.training.own_time import OwnTime
from slurm_resilience.training.probe import Probe
from slurm_resilience.training.proving import Proving
from slurm_resilience.training.restoring import place
from slurm_resilience.training.resume import Resumed, Resumer
from slurm_resilience.training.saving import Saver
from slurm_resilience.training.scaled import ScaledRate
from slurm_resilience.training.sections import section
from slurm_resilience.training.signals import SignalFlags
from slurm_resilience.training.starting import Starting
from slurm_resilience.training.state import Registry
from slurm_resilience.training.steps import Stepper
from slurm_resilience.training.weighing import Weighing

log = logging.getLogger(__name__)


class Run(Weighing, Keeping, Starting, Proving):
    """One rank's hold on a resilient run.

    Under ``slurm-resilience run`` the run's folder, attempt and configuration come from the agent; without one (plain python
    or torchrun) the folder is ``folder``, RESILIENCE_RUN_DIR or ./resilience-run, and everything else is the same.
    ``settings`` are ``seed``, ``global_batch``, ``micro_batch`` and ``checkpoint`` (a mapping of that section's keys, such as
    ``every_steps``; docs/reference/config.md has them all).  Nothing of torch.distributed is touched before
    :meth:`init_process_group` or :meth:`resume`.
    """

    _current: ClassVar[Run | None] = None

    def __init__(self, *, folder: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__(folder, settings)
        self._registry = Registry()
        self._batches: dict[str, data.Source] = {}
        self._probe: Probe | None = None
        self._saver: Saver | None = None
        self._stepper: Stepper | None = None
        self._resumed: Resumed | None = None
        self._scaled_rate: ScaledRate | None = None
        self._own_time: OwnTime | None = None
        self._flags = SignalFlags()
        if not self._flags.install():
            log.warning("Run() was made outside the main thread: signals are not watched")
        self._crashes = CrashReporter(lambda kind, **fields: self._link.send(kind, step=self.step, **fields))
        self._crashes.install()
        Run._current = self

    @classmethod
    def current(cls) -> Run:
        """The run of this process, made when there is none yet."""
        return cls._current or cls()

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._stepper.step if self._stepper else 0

    @property
    def resumed(self) -> Resumed | None:
        """How the run came back; None when it started fresh."""
        return self._resumed

    @property
    def stopping(self) -> bool:
        """The run was asked to stop, has saved, and its script should end with exit code 0."""
        return self._stepper is not None and self._stepper.stopping

    @property
    def outcome(self) -> str:
        """How :meth:`steps` ended: "completed", "already_complete", "stopped"; "" while it has not."""
        return self._stepper.outcome if self._stepper else ""

    # -- before the first step --------------------------------------------------------------------------------

    def init_process_group(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        """Join the other ranks: gloo on CPUs, NCCL where CUDA is.  Does nothing more when the script did it itself.

        A rank that is alone gets a group of itself, so that DistributedDataParallel needs no ``if``.
        All ranks must come.  Raises LaunchError when the environment does not say how.
        """
        self._world.init_process_group(backend, timeout_s)

    def register(
        self, *, model: Any = None, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, **stateful: Any
    ) -> None:
        """Name what must survive: modules, optimizers, schedulers, and anything with ``state_dict`` and ``load_state_dict``.

        May be called several times, before :meth:`resume`.  Raises ConfigError, with what to do, for what cannot be kept.
        """
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, **stateful}
        if self._stepper is not None:
            late = ", ".join(f"{name}=…" for name, thing in objects.items() if thing is not None)
            raise ConfigError(
                f"run.register({late}) came after run.resume()",
                evidence="what is registered now was not restored; a scheduler that is built after the optimizer was loaded "
                "also overwrites the restored learning rate with its first one",
                remedy="build and register everything, the scheduler too, and call run.resume() after that",
            )
        self._registry.add(objects)

    def batches(
        self,
        num_samples: int,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        dataset: str = "",
        seed: int | None = None,
        deal: Deal = "even",
        reduce: LossOf = "mean",
        dp_rank: int | None = None,
        dp_ranks: int | None = None,
        name: str = "train",
    ) -> data.Batches:
        """The same global batch at step ``s`` whatever the world size: ``for micro in batches(step)``.

        Sizes that are left out are the run's.  ``dataset`` is any text that identifies the data: resuming on other data
        is an error.  ``reduce`` is what becomes of gradients over the ranks: DDP and FSDP2 take the "mean".  Ranks that
        share their samples (tensor, pipeline, context parallel ones) are told apart by the plan's mesh, or by ``dp_rank``
        and ``dp_ranks``.
        """
        whole = data.one_size("global_batch", global_batch, self.global_batch)
        part = data.one_size("micro_batch", micro_batch, self.micro_batch)
        ranks = self.dp_ranks if dp_ranks is None else dp_ranks
        made = data.make_batches(
            num_samples,
            whole,
            part,
            rank=self.dp_rank if dp_rank is None else dp_rank,
            ranks=ranks,
            seed=self.seed if seed is None else seed,
            shuffle=shuffle,
            drop_last=drop_last,
            dataset=dataset,
            deal=deal,
            reduce=reduce,
            follows_world=self.keep_accumulation is not None,
        )
        self._take_in(name, made)
        return made

    def loader(self, dataset: Any, global_batch: int | None = None, micro_batch: int | None = None, **options: Any) -> Any:
        """The samples of each step, read ahead by a DataLoader: ``for micro, batch in loader(step)``.

        ``options`` are those of :meth:`batches` (``fingerprint=`` stands for its ``dataset=``; default: the data set's own
        ``fingerprint``, if it has one) and of ``torch.utils.data.DataLoader``; ``loader_class=`` takes another one, such as
        torchdata's StatefulDataLoader.  With ``seed_samples`` (the default) random augmentations follow from seed, epoch and
        sample, so that they are the same on any world.  A data set of shards (``num_shards``, ``read_shard(shard, skip)``) is
        streamed: each sample once per epoch, in an order that follows the readers.
        """
        return loading.make(self, dataset, global_batch, micro_batch, options)

    def _take_in(self, name: str, source: data.Source) -> None:
        if name in self._batches:
            raise ConfigError(
                f"run.batches() was called twice for {name!r}", remedy="give the second stream a name=… of its own"
            )
        if self._stepper is not None:
            place(source, name, self.step, self._resumed.data if self._resumed else {})
        self._batches[name] = source

    def probe(self, fn: Callable[..., Any], *batch: torch.Tensor, tolerance: float | None = None) -> None:
        """A loss that proves the weights: ``fn(*batch)``, recorded with every checkpoint and asked again after loading it.

        ``batch`` should be small; it is kept in the checkpoint.  All ranks call ``fn`` with the same batch, in evaluation
        mode and without gradients; it must draw nothing from the loader.  ``tolerance`` is relative.
        """
        self._probe = Probe(fn, batch, tolerance)
        if self._saver is not None:
            self._saver.probe = self._probe

    def resume(self) -> int:
        """Restore everything from the newest checkpoint that can be trusted; the step to go on from, 0 for a fresh start.

        All ranks must come, once, after everything is built and registered.  Raises ConfigError or MismatchedCheckpoint for the
        user's mistakes, NoValidCheckpoint when there are checkpoints and none can be trusted.
        """
        if self._stepper is not None:
            raise ConfigError("run.resume() was called twice", remedy="call it once, before run.steps()")
        if not self._registry:
            raise ConfigError(
                "Nothing is registered, so there is nothing to resume",
                remedy="run.register(model=…, optimizer=…, scheduler=…) before run.resume()",
            )
        try:
            return self._resume()
        except ResilienceError as error:
            self.record_exception(error)
            raise

    def _resume(self) -> int:
        self._registry.require_schedulers("seen by run.resume()")
        self._link.enter(Phase.RESUME)
        alike.join(self._world, self._registry)
        if offline.wanted() is not None:
            self._verify_offline()
        self._open()
        store = self._open_store()
        mesh = ", ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1)
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        by = f"attempt {self._attempt} of {self._run_id}, {ranks}{f' ({mesh})' * bool(mesh)}"
        resumer, own = self._resumer(store, by), self._read_own_log()
        resumer.excused = frozenset(self.plan.get("excused_attempts", ()))
        resumer.copies = self._local_copies()
        resumer.restorer.own, resumer.restorer.logged = own, self._taken
        resumer.restorer.recompute = self._recompute if self._settings.verify.next_batch else None
        self._resumed = resumer.resume()
        saver = Saver(
            world=self._world,
            registry=self._registry,
            link=self._link,
            store=store,
            mesh=self.mesh,
            pace=self._pace(),
            background=self._settings.background,
            copies=resumer.copies,
        )
        saver.batches, saver.probe, saver.run_id = self._batches, self._probe, self._run_id
        saver.config, saver.acceptance = self._fingerprint(), resumer.acceptance
        metrics = MetricsFile(self._folder) if self.rank == 0 else None
        step = 0
        if self._resumed is None:
            self._start_fresh()
        else:
            step = saver.begun_step = self._resumed.step
            saver.saved_step = step if self._resumed.tier == "shared" else None
            saver.track.load(self._resumed.saved.get("history") or ())
            self._compare(self._resumed.saved.get("config") or {})
            self._say_resumed(self._resumed)
            self._write_resume_down(self._resumed, own, metrics)
        self._saver = saver
        self._own_time = OwnTime(self._link, self._world)
        self._own_time.install(self._registry.models.values(), self._registry.optimizers.values())
        self._stepper = Stepper(
            step=step,
            attempt=self._attempt,
            world=self._world,
            link=self._link,
            saver=saver,
            own_time=self._own_time,
            metrics=metrics,
            settings=self._settings,
            flags=self._flags,
            obey_signals=not self.supervised,
        )
        self._stepper.batches, self._stepper.track = self._batches, saver.track
        self._stepper.before_step = self._let_ranks_check_each_other()
        if self._resumed is not None and self._settings.verify.first_steps:
            self._stepper.first_steps = self._watch_first_steps(self._resumed, store, saver, metrics, by)
        self._scaled_rate = ScaledRate.of_plan(self.plan, self.keep_accumulation)
        if self._scaled_rate is not None:
            self._scaled_rate.drive(self._registry.optimizers)
            if self.rank == 0:
                self._link.send("learning_rate_scaled", **self._scaled_rate.facts())
        noted = self._stepper.note_update
        for optimizer in self._registry.optimizers.values():
            optimizer.register_step_post_hook(lambda *_: noted())
        self._link.beat(step)
        self._link.enter(Phase.USER)
        return step

    def _verify_offline(self) -> NoReturn:
        """Asked for by ``checkpoints verify --deep``: check, say so, end; nothing is opened, marked or trained."""
        request = offline.wanted()
        assert request is not None
        store = CheckpointStore.open(request.root, trusted_group=self._settings.trusted_group)
        offline.answer(request, self._resumer(store, by=""), store, leads=self.rank == 0)
        raise SystemExit(0)

    def _resumer(self, store: CheckpointStore, by: str) -> Resumer:
        resumer = Resumer(world=self._world, registry=self._registry, link=self._link, store=store, seed=self.seed, by=by)
        it = resumer.restorer
        it.batches, it.probe, it.extra_checks = self._batches, self._probe, tuple(self._checks)
        it.limits = self._settings.verify
        return resumer

    def _say_resumed(self, resumed: Resumed) -> None:
        seconds, verify_s = round(resumed.seconds, 6), round(resumed.verify_s, 6)
        self._link.send("resumed", step=resumed.step, checkpoint=resumed.entry.name, seconds=seconds, verify_s=verify_s,
                        world=self.world_size, rng=resumed.rng, tier=resumed.tier)  # fmt: skip
        if self.rank == 0 and resumed.rng != "exact":
            log.warning("the world size has changed: random numbers are derived anew, exact replay of dropout is off")

    # -- the loop ---------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """The index of each step that is still to be taken, up to ``total`` steps over the life of the run.

        After each step: heartbeat, metrics, agreement with the other ranks, a checkpoint when one is due.  Asked to stop
        (by the agent, or by SIGTERM or SIGUSR2 where there is none), all ranks save after the same step and the loop ends;
        at the end a last checkpoint is taken.  Raises ConfigError when :meth:`resume` was forgotten.
        """
        stepper = self._ready("run.steps()")
        self._registry.require_schedulers("seen by run.steps(), so it was built after run.resume()")
        if self._scaled_rate is not None:
            self._scaled_rate.require(self._registry.optimizers, self._batches)
        return stepper.steps(total)

    def report(self, **values: Any) -> None:
        """What this step gave: ``loss``, ``grad_norm``, ``lr``, ``samples``, anything with a name.  All ranks call it alike.

        Rank 0's values are written, one line a step, to metrics.jsonl in the run's folder.
        """
        self._ready("run.report()").report(values)

    def checkpoint(self) -> None:
        """Ask for a checkpoint: after this step when called inside the loop, at once outside.  All ranks call it alike."""
        self._ready("run.checkpoint()").ask_save()

    def should_stop(self, agree: bool = True) -> bool:
        """Whether the run was asked to stop; for long evaluations, which would otherwise outlast the grace period.

        All ranks must call it alike, and get the same answer, so that leaving a loop with collectives in it is safe.  With
        ``agree=False`` it is this rank's own view, for work that one rank does alone.
        """
        return self._ready("run.should_stop()").should_stop(agree)

    def finish(self) -> None:
        """Say that the run is complete although steps are left (early stopping): last checkpoint, then the end.

        :meth:`steps` does it by itself when it reaches ``total``.  Left without it, the loop counts as complete, unsaved.
        """
        self._ready("run.finish()").finish()

    def section(self, name: str, limit: float | Literal["auto"] | None = "auto") -> AbstractContextManager[None]:
        """Say what the time is spent on ("data", "eval", "compile", …): each has its own limit before it counts as a hang.

        ``limit`` in seconds is for the whole section, inner ones included; "auto" is learned from how long this section was
        silent before, inner ones and time before the last beat not included; None means none.  Sections may be nested, and
        each is judged by its own limit.  Raises ConfigError for a limit that is none.
        """
        if name != "data" and self._own_time is not None:
            self._own_time.skip()
        return section(self._link, name, limit)

    def beat(self) -> None:
        """Alive: for long work inside one step."""
        self._link.beat(self.step)

    # -- gradients --------------------------------------------------------------------------------------------

    def accumulate(self, micro: data.Micro) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch: gradients cross the ranks at the step's last one only."""
        return gradients.synchronised(self._registry.models.values(), micro.last)

    # -- the end ----------------------------------------------------------------------------------------------

    def record_exception(self, error: BaseException) -> None:
        """Send an exception as a fact; uncaught ones are sent by themselves."""
        self._crashes.report(error)

    def close(self) -> None:
        """Wait for a save in flight; put back the signal handlers and the exception hook of before."""
        if self._saver is not None:
            self._saver.close()
        if self._stepper is not None:
            self._stepper.close()
        self._flags.restore()
        self._crashes.restore()
        if Run._current is self:
            Run._current = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.record_exception(error)
        self.close()

    def _ready(self, what: str) -> Stepper:
        if self._stepper is None:
            raise ConfigError(
                f"{what} came before run.resume()",
                evidence="without it a relaunched run would start from step 0 again, without a word",
                remedy="call run.resume() once, after run.register(…)",
            )
        return self._stepper
