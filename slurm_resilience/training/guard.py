"""Do the first steps after a resume go on as the run went before?

Three questions to each of them, by what was reported as ``loss`` and ``grad_norm`` (before clipping):

* Is it a number?  NaN and infinity are answered at once.  Where a gradient scaler is registered, a norm that overflows is its
  daily bread and says nothing.
* Is it what the log says of this very step?  A step that was taken before, lost with its attempt and taken again gives the
  same loss.  Asked only where random numbers go on exactly.
* Is it where the last steps were?  Their median, and their median absolute deviation with a floor; too high several times in a
  row, because losses and norms have spikes by right.

A failure condemns the entry and those that were taken after the incident began, and ends the attempt: by then the process holds
what nobody registered (variables of the loop, batches read ahead, buckets of reducers, compiled graphs), and only a new process
holds none of it.  A warm relaunch costs about a second.  It cannot loop: the same step that fails again after going back is the
run's own doing and not the checkpoint's; so is what fails after so many times of going back.  Then the guard stands down, and
says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurm_resilience.errors import CheckpointError
from slurm_resilience.training.track import WATCHED, Rows, watched
from slurm_resilience.training.verifying import Verifying

MAD_TO_SIGMA = 1.4826  # of a normal distribution
LATER_REPLAYS = 10.0  # non-deterministic kernels drift apart from one replayed step to the next
NORM_REPLAYS = 10.0  # where gradients nearly cancel, rounding shows in their norm


class FirstStepsFailed(CheckpointError):
    """What was restored passed all checks, and its first steps show that it is not the run that was saved."""


@dataclass(frozen=True)
class Trouble:
    """One metric of one step that is not as it should be.  ``kind``: "not finite", "replay" or "outlier"."""

    metric: str
    kind: str
    step: int
    expected: str
    measured: float

    def __str__(self) -> str:
        return f"{self.metric} of step {self.step} under guard: expected {self.expected}, measured {self.measured:.6g}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "measured": str(self.measured)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Trouble:
        return cls(
            str(value["metric"]), str(value["kind"]), int(value["step"]), str(value["expected"]), float(value["measured"])
        )


@dataclass(frozen=True)
class Band:
    """Where a metric was over the last steps, as far as outliers do not matter."""

    middle: float
    width: float

    @classmethod
    def of(cls, values: Iterable[float], floor: float, least: int) -> Band | None:
        """None where there are too few values to say anything."""
        good = [value for value in values if math.isfinite(value)]
        if len(good) < least:
            return None
        middle = statistics.median(good)
        spread = MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in good)
        return cls(middle, max(spread, floor * abs(middle)))

    def beyond(self, value: float, factor: float) -> bool:
        return value > self.middle + factor * self.width


class Guard:
    """Looks at the first steps after a resume from ``step``.

    ``before``: rows up to ``step``; ``logged``: rows past it, of attempts before; ``earlier``: what guards of earlier attempts
    have gone back for and the run has not got over since.  ``exact``: random numbers go on as they were; ``scaled``: a gradient
    scaler is registered.
    """

    def __init__(
        self,
        step: int,
        before: Rows,
        logged: Rows,
        limits: Verifying,
        *,
        exact: bool,
        scaled: bool,
        earlier: Iterable[Trouble] = (),
    ) -> None:
        self._step = step
        self._before = before
        self._logged = logged
        self._limits = limits
        self._exact = exact
        self._scaled = scaled
        self._earlier = list(earlier)
        self._in_a_row = dict.fromkeys(WATCHED, 0)
        self._seen = dict.fromkeys(WATCHED, 0)
        self._bands = {name: self._band(name, before) for name in WATCHED}

    def over(self, step: int) -> bool:
        """Whether the first steps lie behind."""
        return step >= self._step + self._limits.first_steps

    def look(self, step: int, said: Mapping[str, Any]) -> Trouble | None:
        """The first thing that is wrong with a completed step."""
        for name, value in watched(said).items():
            trouble = self._finite(name, step, value) or self._replay(name, step, value) or self._outlier(name, step, value)
            if trouble is not None:
                return trouble
        return None

    def unseen(self) -> list[str]:
        """Metrics about which nothing could be said, with the reason."""
        reasons = []
        for name in WATCHED:
            if not self._seen[name]:
                reasons.append(f"{name} was not reported")
            elif self._bands[name] is None and not any(name in row for row in self._logged.values()):
                reasons.append(f"{name} has no history of {self._limits.least_history} steps")
        return reasons

    def excused(self, trouble: Trouble) -> str:
        """Why going back once more would not help; "" where it may."""
        for other in self._earlier:
            if (
                other.metric == trouble.metric
                and other.kind == trouble.kind
                and (trouble.kind == "replay" or other.step == trouble.step)
            ):
                return f"after going back for it, the same again: {trouble}"
        if len(self._earlier) >= self._limits.most_rollbacks:
            return f"gone back {len(self._earlier)} times already, now: {trouble}"
        return ""

    def good_until(self, trouble: Trouble) -> int:
        """The newest step whose checkpoint may still be good.

        That is before the entry itself, and before the metric left its band for good: what a step reports is of the weights
        that the step before it had left behind.
        """
        first = None
        steps = sorted(self._before)
        for place in range(len(steps) - 1, -1, -1):
            value = self._before[steps[place]].get(trouble.metric)
            if value is None:
                continue
            band = self._band(trouble.metric, {step: self._before[step] for step in steps[:place]})
            if math.isfinite(value) and (band is None or not band.beyond(value, self._factor(trouble.metric))):
                break
            first = steps[place]
        return self._step - 1 if first is None else min(self._step, first - 1) - 1

    def _finite(self, name: str, step: int, value: float) -> Trouble | None:
        if math.isfinite(value) or (self._scaled and name == "grad_norm"):
            return None
        return Trouble(name, "not finite", step, "a number", value)

    def _replay(self, name: str, step: int, value: float) -> Trouble | None:
        then = self._logged.get(step, {}).get(name)
        if then is None or not math.isfinite(then) or not math.isfinite(value) or not self._exact:
            return None
        within = self._limits.replay * (NORM_REPLAYS if name == "grad_norm" else 1.0)
        within *= 1.0 if step == self._step + 1 else LATER_REPLAYS
        self._seen[name] += 1
        if abs(value - then) <= within * max(abs(then), 1e-12):
            return None
        return Trouble(name, "replay", step, f"{then:.6g} within {within:g}, as logged when it was taken before", value)

    def _outlier(self, name: str, step: int, value: float) -> Trouble | None:
        self._seen[name] += 1
        band = self._bands[name]
        if band is None or not math.isfinite(value):
            return None
        if not band.beyond(value, self._factor(name)):
            self._in_a_row[name] = 0
            return None
        self._in_a_row[name] += 1
        if self._in_a_row[name] < self._limits.in_a_row:
            return None
        most = band.middle + self._factor(name) * band.width
        said = f"at most {most:.6g} (median {band.middle:.6g}), {self._in_a_row[name]} times in a row above"
        return Trouble(name, "outlier", step, said, value)

    def _factor(self, name: str) -> float:
        return self._limits.loss_factor if name == "loss" else self._limits.grad_norm_factor

    def _band(self, name: str, rows: Rows) -> Band | None:
        floor = self._limits.loss_floor if name == "loss" else self._limits.grad_norm_floor
        values = [row[name] for _, row in sorted(rows.items())[-self._limits.window :] if name in row]
        return Band.of(values, floor, self._limits.least_history)
