"""What happens between two optimizer steps: beat, write down, agree, save, stop.

A step costs the user one store into shared memory, one line of metrics, and an all-reduce that runs behind the next step.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.errors import CheckpointError, ConfigError
from slurm_resilience.progress.page import Phase
from slurm_resilience.training.agreement import Agreement, Wish
from slurm_resilience.training.data import Source
from slurm_resilience.training.first_steps import FirstSteps
from slurm_resilience.training.link import Link
from slurm_resilience.training.metrics import MetricsFile
from slurm_resilience.training.own_time import OwnTime
from slurm_resilience.training.probe import to_float
from slurm_resilience.training.saves import Saves
from slurm_resilience.training.sections import CompileWatch
from slurm_resilience.training.settings import Settings
from slurm_resilience.training.signals import SignalFlags
from slurm_resilience.training.track import Track
from slurm_resilience.training.world import World

REPORT_EVERY_S = 0.2

log = logging.getLogger(__name__)


class Stepper:
    """Counts completed steps, and does what is due after each of them."""

    def __init__(
        self,
        *,
        step: int,
        attempt: int,
        world: World,
        link: Link,
        saver: Saves,
        own_time: OwnTime,
        metrics: MetricsFile | None,
        settings: Settings,
        flags: SignalFlags,
        obey_signals: bool,
    ) -> None:
        self.step = step
        self.stopping = False
        self.outcome = ""
        self.batches: dict[str, Source] = {}
        self.first_steps: FirstSteps | None = None
        self.track = Track()
        self.before_step: Callable[[int], None] | None = None
        self._attempt = attempt
        self._world = world
        self._link = link
        self._saver = saver
        self._own_time = own_time
        self._compiling = CompileWatch(link, began=own_time.skip)
        self._metrics = metrics
        self._settings = settings
        self._flags = flags
        self._obey_signals = obey_signals
        self._agreement = Agreement(world)
        self._agreed_stop: Wish | None = None
        self._saves_done = 0
        self._saves_by_signal = 0
        self._save_asked = False
        self._inside = False
        self._updated = False
        self._first = True
        self._reported: dict[str, Any] = {}
        self._last_reported: dict[str, Any] = {}
        self._last_report_s = 0.0
        self._metrics_failed = False

    # -- the loop ---------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """See :meth:`Run.steps`."""
        self._settle()
        if self.outcome and not self.stopping and total > self.step:
            raise ConfigError(
                f"run.steps({total}) came after the run was complete at step {self.step}",
                evidence="its end has been told, so that the other nodes may be gone",
                remedy="give run.steps() the number of steps over the whole life of the run, once",
            )
        if self.outcome:
            return
        if self.step >= total:
            if self._world.rank == 0:
                log.warning("the run is already complete: it stands at step %d of %d, nothing is trained", self.step, total)
            self._save_last()  # it may have come back from a copy in a node's memory
            self._end("already_complete")
            return
        while self.step < total:
            self._compiling.look()
            self._link.enter(Phase.STEP)
            self._inside, self._updated = True, False
            if self.before_step is not None:
                self.before_step(self.step)
            try:
                yield self.step
            finally:
                self._inside = False
            self._updated = False
            self.step += 1
            self._after_step(total)
            if self.stopping:
                return
        self.finish()

    def note_update(self) -> None:
        """An optimizer has changed the parameters."""
        self._updated = True

    def _settle(self) -> None:
        """Count the step in which the loop was left by ``break``, if its update was made."""
        if self._updated and not self._inside:
            self._updated = False
            self.step += 1

    def _after_step(self, total: int) -> None:
        step = self.step
        self._link.beat(step)
        self._saver.poll()
        for batches in self.batches.values():
            batches.advance(step)
        self._write_down(step)
        agreed = self._agreement.next(self._wish())
        if step >= total:
            self._agreement.drain()
            return
        stop = self._agreed_stop or (agreed if agreed.stop else None)
        if stop is not None:
            self._agreement.drain()
            self._stop(stop)
        else:
            if self._due(step, agreed):
                self._saver.begin(step, self._last_reported)
                self._link.beat(step)
            if self._saver.saved_step != step:
                self._saver.copy(step)
        self._saves_done = max(self._saves_done, agreed.save)
        self._save_asked = False

    def _due(self, step: int, agreed: Wish) -> bool:
        every = self._settings.every_steps
        if self._save_asked or (every is not None and step % every == 0):
            return True
        # A wish is one step old: what was wished before the last save has had its save.
        fresh = self._saver.begun_step is None or self._world.size == 1 or self._saver.begun_step < step - 1
        return agreed.save > self._saves_done or (agreed.timed and fresh)

    def _wish(self) -> Wish:
        orders = self._link.orders()
        stop, cause = orders.stop, orders.cause
        if self._obey_signals:
            if self._flags.seen(signal.SIGUSR1):
                self._flags.forget(signal.SIGUSR1)
                self._saves_by_signal += 1
            if not stop and self._flags.seen(signal.SIGTERM, signal.SIGUSR2):
                stop, cause = True, "SIGTERM" if self._flags.seen(signal.SIGTERM) else "SIGUSR2"
        timed = self._world.rank == 0 and self._saver.pace.due()
        return Wish(stop, cause, max(orders.save, self._saves_by_signal), timed, orders.deadline)

    def should_stop(self, agree: bool) -> bool:
        """See :meth:`Run.should_stop`."""
        if self.stopping or self._agreed_stop is not None:
            return True
        mine = self._wish()
        if not agree:
            return mine.stop
        agreed = self._agreement.now(mine)
        if agreed.stop:
            log.warning("asked to stop (%s): the run ends after this step", agreed.cause)
            self._agreed_stop = agreed
        return agreed.stop

    # -- the ends ---------------------------------------------------------------------------------------------

    def _stop(self, wish: Wish) -> None:
        saved = self._saver.save_before(wish.deadline, self.step, self._last_reported)
        self._link.beat(self.step)
        self.stopping = True
        self.outcome = "stopped"
        if saved:
            self._saver.drop_copies()
        self._link.send("stopped", step=self.step, why=wish.cause, saved=saved)
        self._link.done()

    def finish(self) -> None:
        """See :meth:`Run.finish`."""
        if self.outcome:
            return
        self._settle()
        self._agreement.drain()
        self._save_last()
        self._end("completed")

    def _save_last(self) -> None:
        """The state of this step is durable, or an error."""
        self._saver.settle()
        if self._saver.saved_step != self.step and self.save() is None:
            raise CheckpointError(
                f"The run is complete at step {self.step}, but its last checkpoint could not be taken",
                evidence="the reason was logged, and sent as checkpoint_failed",
                remedy="make room for it, or repair its folder, and start the run again: it goes on from the last one",
            )

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self._saver.drop_copies()
        self._link.send("finished", step=self.step, outcome=outcome)
        self._link.done()

    # -- saving -----------------------------------------------------------------------------------------------

    def ask_save(self) -> Entry | None:
        """See :meth:`Run.checkpoint`."""
        if self._inside:
            self._save_asked = True
            return None
        self._settle()
        return self.save()

    def save(self) -> Entry | None:
        self._own_time.skip()
        entry = self._saver.save(self.step, self._last_reported)
        self._link.beat(self.step)
        return entry

    def close(self) -> None:
        """Let go of what hangs in other people's hooks."""
        self._compiling.forget()
        self._own_time.remove()

    # -- telling ----------------------------------------------------------------------------------------------

    def report(self, values: dict[str, Any]) -> None:
        """See :meth:`Run.report`."""
        for name, value in values.items():
            if name in ("step", "attempt", "world", "t"):
                raise ConfigError(f"run.report({name}=…): this field is written by the run itself", remedy="use another name")
            self._reported[name] = value if isinstance(value, (bool, int, str)) else to_float(value)

    def amend(self, values: dict[str, Any]) -> None:
        """What is known of the last completed step only now: one more line for it, which is the one that counts."""
        self.report(values)
        said, self._reported = self._reported, {}
        self._last_reported = {**self._last_reported, **said}
        if self._world.rank == 0:
            self._tell_and_append(self.step, said)

    def _write_down(self, step: int) -> None:
        said, self._reported = self._reported, {}
        self._last_reported = said or self._last_reported
        if self._first:
            self._first = False
            self._link.send("first_step", step=step, loss=said.get("loss"))
        self.track.add(step, said)
        if self._world.rank == 0:
            self._tell_and_append(step, said)
        if self.first_steps is not None:
            self.first_steps.after(step, said)
            if self.first_steps.over:
                self.first_steps = None

    def _tell_and_append(self, step: int, said: dict[str, Any]) -> None:
        now = time.time()
        self._append({"step": step, "attempt": self._attempt, "world": self._world.size, "t": round(now, 3), **said})
        if said and time.monotonic() - self._last_report_s >= REPORT_EVERY_S:
            self._last_report_s = time.monotonic()
            self._link.send("step_reported", step=step, **said)

    def _append(self, line: dict[str, Any]) -> None:
        """One line of metrics.  A full disk costs lines of the curve, not the run."""
        if self._metrics is None:
            return
        try:
            self._metrics.write(line)
        except OSError as error:
            if not self._metrics_failed:
                log.warning("metrics are not written, from step %s on: %s", line["step"], error)
            self._metrics_failed = True
        else:
            self._metrics_failed = False
