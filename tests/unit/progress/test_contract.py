"""What an agent puts into a rank's environment is what the rank reads out of it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.progress.contract import RankContract

CONTRACT = RankContract(
    run_dir="/r", run_id="id", attempt=3, restart_count=1, job_id="12", node="n1", page="/p", facts="/f", checkpoints="/c",
    settings={"seed": 1, "checkpoint": {"every_steps": None}}, plan={"mesh": {"dp_shard": 2}, "nodes": ["n1"]},
)  # fmt: skip


def test_there_and_back() -> None:
    environment = CONTRACT.to_environment()
    assert all(isinstance(value, str) for value in environment.values())
    assert all(name.startswith("RESILIENCE_") for name in environment)
    assert RankContract.from_environment({"OTHER": "x", **environment}) == CONTRACT
    assert len(environment) == len(dataclasses.fields(CONTRACT))


def test_without_an_agent_there_is_none() -> None:
    assert RankContract.from_environment({}) is None
    assert RankContract.from_environment({"RESILIENCE_RUN_DIR": "/r"}) is None


def test_half_a_contract_is_an_error() -> None:
    environment = CONTRACT.to_environment()
    del environment["RESILIENCE_ATTEMPT"]
    with pytest.raises(KeyError):
        RankContract.from_environment(environment)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), st.integers(0, 10**9))
def test_odd_names_and_numbers_survive(text: str, number: int) -> None:
    odd = dataclasses.replace(CONTRACT, run_dir=text, job_id=text, attempt=number, settings={text: number})
    assert RankContract.from_environment(odd.to_environment()) == odd
