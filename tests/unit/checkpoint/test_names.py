"""Only whole, committed names count as checkpoints."""

from __future__ import annotations

import pytest

from slurm_resilience.checkpoint import names


def test_a_new_name_is_parsed_back_and_never_repeated() -> None:
    made = {names.new_name(20, 3) for _ in range(200)}
    assert len(made) == 200
    assert {(p.step, p.attempt) for name in made if (p := names.parse(name))} == {(20, 3)}


@pytest.mark.parametrize(
    "name",
    [
        "step-00000020-a00003-0123abcd.tmp",
        "step-00000020-a00003-0123abcd-tmp",
        ".step-00000020-a00003-0123abcd",
        "step-00000020-a00003-0123abcd\n",
        "step-20",
        "checkpoint-20",
        "xstep-00000020-a00003-0123abcd",
        "step-00000020-a00003-0123ABCD",
        ".writing-a00003",
        "latest",
        "",
    ],
)
def test_nothing_else_is_a_checkpoint(name: str) -> None:
    assert names.parse(name) is None


def test_large_steps_and_attempts_keep_their_number() -> None:
    parsed = names.parse(names.new_name(1_234_567_890, 123_456))
    assert parsed is not None
    assert (parsed.step, parsed.attempt) == (1_234_567_890, 123_456)
