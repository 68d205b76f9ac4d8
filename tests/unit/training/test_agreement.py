from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import Cause
from slurm_resilience.training.agreement import Agreement, Wish
from slurm_resilience.training.world import World

wishes = st.builds(
    Wish,
    stop=st.just(True),
    cause=st.sampled_from([*map(str, Cause), "SIGTERM", "SIGUSR2"]),
    save=st.integers(0, 1000),
    timed=st.booleans(),
    deadline=st.none() | st.integers(0, 2_000_000_000_000).map(lambda ms: ms / 1000),
)


@given(wishes)
def test_a_wish_crosses_the_ranks_unchanged(wish: Wish) -> None:
    assert Wish._of(wish._numbers()) == wish
    assert Wish._of(Wish(save=wish.save, timed=wish.timed)._numbers()) == Wish(save=wish.save, timed=wish.timed)


def test_a_cause_that_nobody_knows_still_stops() -> None:
    assert Wish._of(Wish(stop=True, cause="new in a later release")._numbers()) == Wish(stop=True, cause="unknown")


@given(st.lists(wishes | st.just(Wish()), min_size=1, max_size=4))
def test_together_the_earliest_deadline_and_anybodys_stop_count(several: list[Wish]) -> None:
    joined = Wish._of([max(column) for column in zip(*(wish._numbers() for wish in several), strict=True)])
    assert joined.stop == any(wish.stop for wish in several)
    assert joined.save == max(wish.save for wish in several)
    deadlines = [wish.deadline for wish in several if wish.deadline is not None]
    assert joined.deadline == (pytest.approx(min(deadlines), abs=0.001) if deadlines else None)


def test_alone_a_rank_agrees_with_itself_at_once() -> None:
    agreement = Agreement(World())
    wish = Wish(stop=True, cause="preemption")
    assert agreement.next(wish) == agreement.now(wish) == wish
    assert agreement.drain() == Wish()
