"""From what ranks say to events."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_resilience.observe.events import EventWriter
from slurm_resilience.observe.vocabulary import FROM_SUPERVISOR
from slurm_resilience.runtime.facts import Facts, quote
from slurm_resilience.runtime.messages import Fact


def fact(rank: int, kind: str, t: float = 1.0, **fields: Any) -> Fact:
    return Fact(1, rank, kind, fields, t)


def test_what_all_ranks_say_is_one_event_when_the_last_has_said_it() -> None:
    facts = Facts(3)
    assert facts.hear("n1", fact(2, "resumed", 5.0, step=40, seconds=0.3)) == []
    assert facts.hear("n1", fact(0, "resumed", 6.0, step=40, seconds=0.1, checkpoint="c")) == []
    assert facts.hear("n1", fact(0, "resumed", 6.1, step=40, seconds=0.1, checkpoint="c")) == []
    ((event, fields, t),) = facts.hear("n1", fact(1, "resumed", 5.5, step=40, seconds=0.2))
    assert (event, t) == ("resumed", 6.1)
    assert fields == {"step": 40, "seconds": 0.3, "checkpoint": "c", "ranks": 3}
    assert facts.hear("n1", fact(1, "resumed", 9.0, step=40)) == []


def test_words_are_those_of_the_lowest_rank() -> None:
    facts = Facts(2)
    facts.hear("n1", fact(1, "stopped", why="b"))
    assert facts.words("stopped") == {"why": "b"}
    facts.hear("n1", fact(0, "stopped", why="a"))
    assert facts.words("stopped") == {"why": "a"}
    assert facts.words("finished") == {}


def test_a_single_rank_s_fact_names_it() -> None:
    assert quote("n2", fact(3, "checkpoint_committed", 7.0, step=9)) == (
        "checkpoint_committed",
        {"node": "n2", "rank": 3, "step": 9},
        7.0,
    )


@pytest.mark.parametrize("kind", [*sorted(FROM_SUPERVISOR), "Shouting", "with space", "", "x" * 100])
def test_a_rank_cannot_speak_as_the_supervisor(kind: str) -> None:
    event, fields, _ = quote("n1", fact(0, kind, step=3))
    assert event == "fact_received"
    assert fields["kind"] == kind[:80]


def test_no_field_can_forge_the_envelope(tmp_path: Any) -> None:
    said = {"attempt": 7, "seq": 1, "event": "x", "node": "n9", "rank": 5, "name": "load"}
    event, fields, t = quote("n1", Fact(1, 0, "phase_done", said, 99.0))
    line = EventWriter(tmp_path, restart=0).write(event, t=t, attempt=1, **fields)
    assert (line["attempt"], line["seq"], line["event"], line["node"], line["rank"], line["t"]) == (
        1,
        1,
        "phase_done",
        "n1",
        0,
        99.0,
    )
    assert (line["its_attempt"], line["its_node"]) == (7, "n9")


def test_of_a_long_traceback_the_end_is_kept() -> None:
    _, fields, _ = quote("n1", fact(0, "exception", traceback="a" * 50_000 + "ValueError"))
    assert len(fields["traceback"]) == 8000
    assert fields["traceback"].endswith("ValueError")
