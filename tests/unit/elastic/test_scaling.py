"""The batch follows the world only when asked, exactly proportional, and says what it does to the learning rate."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.elastic import plan_batch
from slurm_resilience.elastic.scaling import scale_batch
from slurm_resilience.errors import ConfigError


def test_25_percent_fewer_ranks() -> None:
    linear = scale_batch(2048, 16, 12, "linear")
    assert (linear.global_batch, linear.lr_factor) == (1536, 0.75)
    assert scale_batch(2048, 16, 12, "sqrt").lr_factor == pytest.approx(0.75**0.5)
    assert scale_batch(2048, 16, 12, "none").lr_factor == 1.0
    assert scale_batch(2048, 16, 32, "linear").lr_factor == 2.0
    assert scale_batch(10, 4, 2, "linear").global_batch == 5


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 500), st.integers(1, 16))
def test_the_accumulation_stays(reference: int, ranks: int, batch: int, micro: int) -> None:
    if batch < reference:
        with pytest.raises(ConfigError):
            scale_batch(batch, reference, ranks, "linear")
        return
    scaled = scale_batch(batch, reference, ranks, "linear")
    assert scaled.ratio == Fraction(scaled.global_batch, batch)
    assert abs(Fraction(scaled.global_batch, ranks) - Fraction(batch, reference)) < 1
    before = plan_batch(batch, micro, reference).accumulation
    assert before - 1 <= plan_batch(scaled.global_batch, micro, ranks).accumulation <= before
    if batch % reference == 0:
        assert plan_batch(scaled.global_batch, micro, ranks).accumulation == before


def test_an_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'linear'"):
        scale_batch(8, 2, 2, "lineal")  # type: ignore[arg-type]
