from __future__ import annotations

import pytest

from slurm_resilience.checkpoint.retention import Retention
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
    assert (joined.every_steps, joined.every_min, joined.retention.keep_last, joined.seed, joined.global_batch) == (
        10,
        5.0,
        2,
        9,
        48,
    )


def test_an_argument_that_is_none_is_not_given() -> None:
    assert settle({"checkpoint": None, "global_batch": None}, SUBMITTED).global_batch == 48


def test_another_batch_than_the_plan_is_an_error() -> None:
    with pytest.raises(ConfigError, match="wants global_batch=64, the run was submitted with global_batch=48") as caught:
        settle({"global_batch": 64}, SUBMITTED)
    assert "give `slurm-resilience run` or `submit` --global-batch 64" in str(caught.value)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ({"gloabl_batch": 3}, "did you mean 'global_batch'"),
        ({"checkpoint": {"every_step": 3}}, "did you mean 'every_steps'"),
        ({"checkpoint": {"every_steps": 0}}, "every_steps"),
        ({"checkpoint": 5}, "must be a mapping"),
        ({"checkpoint": {"every_min": "automatic"}}, "every_min"),
        ({"checkpoint": {"auto_bounds_min": (5, 1)}}, "the least and the most minutes"),
        ({"checkpoint": {"local_dir": "/dev/shm/x"}}, "local_dir without local_every_steps"),
        ({"checkpoint": {"keep_best_is": "highest"}}, "without keep_best"),
    ],
)
def test_nonsense_is_refused_with_the_reason(script: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settle(script, None)


def test_every_key_of_the_configuration_reaches_the_ranks() -> None:
    """A key that a script may not give, or that ``settle`` forgets, would be a switch without a wire."""
    from slurm_resilience.config import CheckpointConfig
    from slurm_resilience.training.settings import _CHECKPOINT_KEYS

    assert set(_CHECKPOINT_KEYS) == set(CheckpointConfig.model_fields)
    assert settle({}, {"checkpoint": CheckpointConfig().model_dump(mode="json")}) == Settings()
    other = {
        "every_steps": 7, "every_min": "auto", "auto_bounds_min": [1.0, 2.0], "keep_last": 4, "keep_every_steps": 100,
        "keep_every_hours": 6.0, "keep_best": "accuracy", "keep_best_is": "highest", "dir": "/c", "background": False,
        "local_every_steps": 5, "local_dir": "/l", "trusted_group": "lab",
    }  # fmt: skip
    assert CheckpointConfig.model_validate(other).model_dump(mode="json") == other
    changed = {
        name: value for name, value in vars(settle({"checkpoint": other}, None)).items() if value != getattr(Settings(), name)
    }
    assert changed.pop("retention") == Retention(4, 100, 6.0, "accuracy", best_is="highest")
    assert sorted(map(str, changed.values())) == sorted(map(str, [7, "auto", (1.0, 2.0), "/c", False, 5, "/l", "lab"]))
