"""Which of the many ends that one fault causes was the first?"""

from __future__ import annotations

from typing import Any

import pytest

from slurm_resilience.errors import Cause, ExitCode
from slurm_resilience.runtime.evidence import Evidence, Origin


def origin(*clues: tuple[str, dict[str, Any]]) -> Origin:
    evidence = Evidence()
    for kind, fields in clues:
        if kind == "exception":
            evidence.exception(**{"node": "n1", "kind": "ValueError", "message": "x", "step": 3, **fields})
        elif kind == "exit":
            evidence.exit(**{"node": "n1", "code": 1, "signal": "", "tail": [], **fields})
        elif kind == "left":
            evidence.left(**{"node": "n1", **fields})
        else:
            evidence.add(Cause(kind), **{"node": "n1", "detail": "seen", **fields})
    found = evidence.origin()
    assert found is not None
    return found


ECHOES = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:47: Connection reset by peer.",
    "[2] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store",
    "DistBackendError: NCCL error: remote process exited or there was a network error",
    "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash? TCPStore",
    "Broken pipe",
]


@pytest.mark.parametrize("echo", ECHOES)
def test_an_echo_is_never_the_origin_while_there_is_another_clue(echo: str) -> None:
    found = origin(
        ("exception", {"t": 1.0, "rank": 0, "kind": "RuntimeError", "message": echo}),
        ("exit", {"t": 1.1, "rank": 0}),
        ("exception", {"t": 2.0, "rank": 1, "message": "bad sample"}),
        ("exit", {"t": 2.1, "rank": 1}),
    )
    assert (found.rank, found.since) == (1, 2.0)
    assert "bad sample (after step 3)" in found.detail


def test_of_echoes_alone_the_earliest_counts_and_nobody_is_blamed_for_it() -> None:
    found = origin(
        ("exception", {"t": 2.0, "rank": 0, "kind": "RuntimeError", "message": ECHOES[0]}),
        ("exception", {"t": 1.0, "rank": 1, "kind": "RuntimeError", "message": ECHOES[0]}),
    )
    assert (found.rank, found.signature, found.cause) == (1, "", Cause.RANK_CRASH)


def test_a_rank_that_just_left_explains_echoes_and_nothing_else() -> None:
    echo = ("exception", {"t": 1.2, "rank": 0, "kind": "RuntimeError", "message": ECHOES[0]})
    found = origin(("left", {"t": 1.0, "rank": 1}), ("left", {"t": 1.1, "rank": 2}), echo)
    assert (found.rank, found.cause) == (1, Cause.RANK_CRASH)
    assert "exited with 0" in found.detail
    real = ("exception", {"t": 5.0, "rank": 3, "message": "bad sample"})
    assert origin(("left", {"t": 1.0, "rank": 1}), echo, real).rank == 3


def test_a_rank_killed_before_the_echoes_is_the_origin() -> None:
    found = origin(
        ("exception", {"t": 1.2, "rank": 0, "kind": "RuntimeError", "message": ECHOES[0]}),
        ("exit", {"t": 1.3, "rank": 3, "code": -9, "signal": "SIGKILL", "tail": ["step 41", ""]}),
    )
    assert (found.rank, found.detail) == (3, "killed by SIGKILL; last line of its log: step 41")


def test_a_lost_node_explains_the_echoes_that_came_before_it_was_noticed() -> None:
    found = origin(
        ("exception", {"t": 10.0, "rank": 0, "kind": "RuntimeError", "message": ECHOES[0]}),
        ("exit", {"t": 10.1, "rank": 0}),
        ("node_lost", {"t": 9.8, "node": "n3"}),
    )
    assert (found.cause, found.node) == (Cause.NODE_LOST, "n3")


def test_a_crash_before_the_loss_of_a_node_is_the_origin() -> None:
    assert origin(("exit", {"t": 5.0, "rank": 2, "code": -11, "signal": "SIGSEGV"}), ("node_lost", {"t": 6.0})).rank == 2


def test_the_same_error_has_the_same_signature_wherever_its_objects_lie() -> None:
    first, second = (
        origin(("exception", {"t": 1.0, "rank": 0, "message": f"<Tensor at {at}>"})) for at in ("0x7f01", "0x9A22")
    )
    assert first.signature == second.signature != ""
    other = origin(("exception", {"t": 1.0, "rank": 0, "message": "<Tensor at 0x1>", "step": 4}))
    assert other.signature != first.signature


@pytest.mark.parametrize(
    ("clue", "cause"),
    [
        (("exception", {"t": 1.0, "rank": 0, "kind": "torch.OutOfMemoryError", "message": "CUDA out of memory"}), Cause.OOM),
        (("exception", {"t": 1.0, "rank": 0, "kind": "MemoryError", "message": ""}), Cause.OOM),
        (("exit", {"t": 1.0, "rank": 0, "tail": ["numpy.core._exceptions._ArrayMemoryError: Unable"]}), Cause.OOM),
        (("exception", {"t": 1.0, "rank": 0, "kind": "slurm_resilience.errors.NoValidCheckpoint"}), Cause.BAD_CHECKPOINT),
        (("exception", {"t": 1.0, "rank": 0, "kind": "ConfigError"}), Cause.CONFIG_ERROR),
        (("exit", {"t": 1.0, "rank": 0, "code": int(ExitCode.CONFIG_ERROR)}), Cause.CONFIG_ERROR),
        (("exit", {"t": 1.0, "rank": 0, "code": int(ExitCode.HANG)}), Cause.HANG),
        (("exit", {"t": 1.0, "rank": 0, "code": 3}), Cause.RANK_CRASH),
        (("exit", {"t": 1.0, "rank": 0, "code": int(ExitCode.INTERNAL)}), Cause.RANK_CRASH),
        (("hang", {"t": 1.0, "rank": 0}), Cause.HANG),
    ],
)
def test_causes(clue: tuple[str, dict[str, Any]], cause: Cause) -> None:
    assert origin(clue).cause is cause


def test_our_own_header_is_not_taken_for_a_rank_s_last_words() -> None:
    found = origin(("exit", {"t": 1.0, "rank": 0, "code": 1, "tail": ["=== attempt 3 on n1 ===", ""]}))
    assert found.detail == "exited with 1"


def test_without_a_clue_there_is_no_origin() -> None:
    assert Evidence().origin() is None
    assert not Evidence().seen


@pytest.mark.parametrize(
    ("kind", "code", "cause"),
    [
        ("ConfigErrorOfALaterRelease", 78, Cause.CONFIG_ERROR),
        ("MismatchedCheckpoint", 84, Cause.BAD_CHECKPOINT),
        ("MismatchedCheckpoint", None, Cause.BAD_CHECKPOINT),
        ("UntrustedCheckpoint", 84, Cause.BAD_CHECKPOINT),
        ("RestoreFailed", 84, Cause.RANK_CRASH),
        ("Fenced", 84, Cause.RANK_CRASH),
        ("LaunchError", 89, Cause.RANK_CRASH),
    ],
)
def test_an_error_of_ours_says_by_its_code_what_it_means(kind: str, code: int | None, cause: Cause) -> None:
    clue = ("exception", {"t": 1.0, "rank": 0, "kind": kind, "exit_code": code, "message": "allocator ran out of memory?"})
    found = origin(("exception", {**clue[1], "message": "of another model"}))
    assert found.cause is cause
    assert (found.signature == "") is (cause is not Cause.RANK_CRASH)
    if cause is not Cause.RANK_CRASH:
        assert origin(clue).cause is cause


def test_where_no_step_was_taken_none_is_named() -> None:
    for step in (-1, 0, None):
        assert "step" not in origin(("exception", {"t": 1.0, "rank": 0, "step": step})).detail
