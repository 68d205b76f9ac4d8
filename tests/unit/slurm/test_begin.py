"""The begin time is late enough for the job to have completed, and no later."""

from __future__ import annotations

import pytest

from slurm_resilience.slurm.begin import QUICK_S, begin_in_s
from slurm_resilience.slurm.client import AccountingRecord
from slurm_resilience.slurm.states import JobState


def runs(*took: float) -> list[AccountingRecord]:
    """Runs of one job, each of 100 s, with so many seconds of completing after each."""
    out, at = [], 1000.0
    for gap in (*took, 0.0):
        out.append(AccountingRecord("1", JobState.REQUEUED, None, 0, 0, at, at, at + 100))
        at += 100 + gap
    return out


@pytest.mark.parametrize(
    ("config", "least"),
    [({"Epilog": "", "EpilogSlurmctld": ""}, 0), ({"Epilog": "/etc/epilog"}, 5), ({"Epilog[0]": "/etc/epilog.d/*"}, 5),
     ({"EpilogSlurmctld": "/x"}, 5), ({}, 5)],
)  # fmt: skip
def test_an_epilog_or_not_knowing_needs_room(config: dict[str, str], least: float) -> None:
    assert begin_in_s(config) > least
    assert (begin_in_s(config) == QUICK_S) is (least == 0)


def test_what_it_took_before_counts_more_than_settings() -> None:
    assert begin_in_s({"Epilog": "/etc/epilog"}, runs(0.0, 0.0)) == QUICK_S
    assert begin_in_s({"Epilog": ""}, runs(0.0, 20.0)) > 21
    assert begin_in_s({"Epilog": ""}, runs(1.0)) > 2  # 1 s between whole seconds may be nearly two
    assert begin_in_s({"Epilog": ""}, runs()) == QUICK_S
