"""Whatever was frozen or cut, the ranks are stopped before the supervisor launches elsewhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.runtime.lease import Lease

SILENCE, LOST = 2.5, 4.0


def test_silence_ends_it() -> None:
    lease = Lease(SILENCE, LOST, 100.0)
    assert not lease.has_ended(102.4)
    assert lease.has_ended(102.6)
    lease.renew(101.0)
    assert not lease.has_ended(103.4)
    lease.renew(99.0)
    assert lease.age(103.4) == 103.4 - 101.0


def test_a_short_freeze_is_forgiven_until_an_answer_could_have_come() -> None:
    lease = Lease(SILENCE, LOST, 100.0)
    lease.wake(102.7)
    assert not lease.has_ended(103.1)
    assert lease.has_ended(103.3)
    lease.wake(102.7)
    lease.renew(102.7)  # the answer
    assert not lease.has_ended(105.0)


def test_a_long_freeze_is_not() -> None:
    lease = Lease(SILENCE, LOST, 100.0)
    lease.wake(103.3)
    assert lease.has_ended(103.3)


@given(st.lists(st.tuples(st.floats(0, 10), st.sampled_from(["renew", "wake", "pass"])), max_size=30))
def test_it_never_outlasts_the_supervisors_patience(moves: list[tuple[float, str]]) -> None:
    """``renew`` is the last beat that the supervisor heard: it waits LOST from then on, or longer."""
    now = heard = 100.0
    lease = Lease(SILENCE, LOST, now)
    for seconds, what in moves:
        now += seconds
        if what == "renew":
            lease.renew(now)
            heard = now
        elif what == "wake":
            lease.wake(now)
        if now > heard + LOST - 0.75:
            assert lease.has_ended(now)


def test_while_nothing_runs_there_is_time_to_ask() -> None:
    """All of the job may have been suspended: the ranks are held until the supervisor has answered."""
    lease = Lease(SILENCE, LOST, 100.0)
    assert lease.hold(190.0) > 191.0
    assert not lease.has_ended(191.0)
    assert lease.has_ended(193.0)
    lease.hold(190.0)
    lease.renew(190.1)
    assert not lease.has_ended(192.0)
    assert lease.has_ended(193.0)
