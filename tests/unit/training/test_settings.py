from __future__ import annotations

import pytest

from slurm_resilience.errors import ConfigError
from slurm_resilience.training.settings import Settings, settle

SUBMITTED = {
    "seed": 3,
    "global_batch": 48,
    "micro_batch": 4,
    "checkpoint": {"every_steps": 50, "every_min": 5.0, "keep_last": 2},
}


def test_without_anything_the_defaults_hold() -> None:
    assert settle({}, None) == Settings()


def test_the_script_wins_over_the_run_and_the_rest_of_the_run_stays() -> None:
    joined = settle({"checkpoint": {"every_steps": 10}, "seed": 9}, SUBMITTED)
    assert (joined.every_steps, joined.every_min, joined.keep_last, joined.seed, joined.global_batch) == (10, 5.0, 2, 9, 48)


def test_an_argument_that_is_none_is_not_given() -> None:
    assert settle({"checkpoint": None, "global_batch": None}, SUBMITTED).global_batch == 48


def test_another_batch_than_the_plan_is_an_error() -> None:
    with pytest.raises(ConfigError, match="wants global_batch=64, the run was submitted with global_batch=48"):
        settle({"global_batch": 64}, SUBMITTED)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ({"gloabl_batch": 3}, "did you mean 'global_batch'"),
        ({"checkpoint": {"every_step": 3}}, "did you mean 'every_steps'"),
        ({"checkpoint": {"every_steps": 0}}, "every_steps"),
        ({"checkpoint": 5}, "must be a mapping"),
    ],
)
def test_nonsense_is_refused_with_the_reason(script: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settle(script, None)
