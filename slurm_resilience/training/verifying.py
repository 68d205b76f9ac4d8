"""How far a restored run may be from the one that was saved, with the reason for each number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verifying:
    """The section ``verify`` of the configuration, as ranks use it; docs/reference/config.md says what each number does.

    * ``probe_same_world``: the same kernels on the same numbers; only a choice of kernels by memory alignment may differ.
    * ``probe_other_world``: sums over shards are taken in another order; a wrong weight moves the loss by far more.
    * ``probe_low_precision``: the same with 8 bits of mantissa (bfloat16): one rounding is 0.4 %.
    * ``replay``: the first step taken again; atomics on GPUs add in any order, 1e-5 to 1e-4 in published runs.
    * ``loss_factor``, ``grad_norm_factor``: in robust standard deviations; norms have heavier tails than losses.
    * ``loss_floor``, ``grad_norm_floor``: of the median, where the last steps hardly differ from each other.
    * ``in_a_row``: a spike is one step, a wrong state stays.
    """

    probe_same_world: float = 1e-6
    probe_other_world: float = 1e-4
    probe_low_precision: float = 2e-2
    first_steps: int = 10
    window: int = 64
    least_history: int = 16
    in_a_row: int = 3
    loss_factor: float = 8.0
    loss_floor: float = 0.02
    grad_norm_factor: float = 20.0
    grad_norm_floor: float = 0.25
    replay: float = 1e-3
    most_rollbacks: int = 2
    next_batch: bool = True
    recompute_every_steps: int | None = None
    most_entries: int = 8
    most_s: float = 1800.0
    start_fresh: bool = False

    @classmethod
    def of(cls, section: Mapping[str, Any] | None) -> Verifying:
        """From the checked configuration's section; keys of other releases are passed over."""
        known = cls.__dataclass_fields__
        return cls(**{name: value for name, value in (section or {}).items() if name in known})
