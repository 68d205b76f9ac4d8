"""Errors are evidence: three parts, one paragraph, the same on the other side of a pickle."""

from __future__ import annotations

import pickle

import pytest

from slurm_resilience import errors
from slurm_resilience.errors import EXIT_CODE_OF, Cause, ExitCode, ResilienceError, nearest
from slurm_resilience.hooks import hints

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ResilienceError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_a_pickle_with_all_its_parts(kind: type[ResilienceError]) -> None:
    error = kind("The index is torn", evidence="line 3 ends early", remedy="run `checkpoints repair`")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.what, again.evidence, again.remedy) == (error.what, error.evidence, error.remedy)
    assert str(again) == str(error)
    assert isinstance(again.exit_code, ExitCode)


def test_the_paragraph_has_each_part_once_and_full_stops() -> None:
    assert str(ResilienceError("A", evidence="b.", remedy="c!")) == "A. How we know: b. What to do: c!"
    assert str(ResilienceError("Really?")) == "Really?"


def test_each_cause_has_an_exit_code_that_neither_python_nor_the_shell_uses() -> None:
    assert set(EXIT_CODE_OF) == set(Cause)
    assert all(code not in (0, 1, 2) and not 126 <= code <= 165 for code in EXIT_CODE_OF.values())
    # 75 means "requeued, not over": a cause must never claim it
    assert ExitCode.REQUEUED not in EXIT_CODE_OF.values()
    assert len({int(code) for code in ExitCode}) == len(ExitCode)


def test_the_list_of_causes_is_closed() -> None:
    """Users, sites and old event files rely on these words.  What is no fault has a word of the views, not a cause."""
    words = [
        "preemption", "time_limit", "node_lost", "node_drained", "launch_failed", "rank_crash", "hang", "bad_checkpoint", "oom",
        "app_error", "config_error", "cancelled", "unknown",
    ]  # fmt: skip
    assert [cause.value for cause in Cause] == words == list(hints.CAUSES)


def test_causes_are_plain_words_in_events() -> None:
    assert f"{Cause.NODE_LOST}" == str(Cause.NODE_LOST) == Cause.NODE_LOST == "node_lost"


def test_nearest_names_the_likely_word_first() -> None:
    assert nearest("chekpoints", ["run", "checkpoints"]) == "did you mean 'checkpoints'? valid: checkpoints, run"
    assert nearest("zzz", ["run"]) == "valid: run"


def test_a_guess_is_not_buried_under_a_hundred_names_and_dashes_are_no_likeness() -> None:
    many = [f"--option-{number}" for number in range(90)]
    assert nearest("--foldr", ["--folder", *many]) == "did you mean '--folder'?"
    assert nearest("bda", ["bad", "good"]).startswith("did you mean 'bad'?")
    assert nearest("lin", ["linear", "none"]).startswith("did you mean 'linear'?")
    assert nearest("--bogus", ["--gpus", "--nodes", *many]).startswith("valid: ")
    assert nearest("--bogus", ["--nodes", "--help"]) == "valid: --help, --nodes"
