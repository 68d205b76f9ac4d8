"""A typo in a setting is found before a daemon dies of it."""

from __future__ import annotations

import pytest

from slurm_resilience.errors import ConfigError
from slurm_resilience.sandbox.keys import CLUSTER, OURS, PARTITION, canonical


def test_slurm_s_own_spelling() -> None:
    assert canonical("killwait") == "KillWait"
    assert canonical("gracetime") == "low.GraceTime"
    assert canonical("high.gracetime") == "high.GraceTime"
    assert canonical("authinfo.CRED_EXPIRE") == "AuthInfo.cred_expire"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("SlurmTimeout", "did you mean 'SlurmdTimeout'"),
        ("PreemptParameter", "did you mean 'PreemptParameters'"),
        ("low.Grace", "did you mean 'GraceTime'"),
        ("lo.GraceTime", "did you mean 'low'"),
        ("AuthInfo.credexpire", "did you mean 'cred_expire'"),
        ("AuthInfo", "socket of the sandbox's own munge"),
        ("slurmctldhost", "control host"),
        ("AccountingStorageType", "--no-accounting"),
        ("", "slurm.conf"),
        (".", "low"),
        ("xyzzy", "see slurm.conf"),
        ("Nodes", "slurm.conf"),
    ],
)
def test_what_cannot_be_set_says_so(key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        canonical(key)
    assert hint in str(caught.value)


def test_what_others_need_to_set_is_known() -> None:
    wanted = (
        "SlurmdTimeout PreemptParameters SlurmctldParameters KillWait MaxBatchRequeue EpilogSlurmctld PrologFlags RequeueExit"
    )
    assert set(wanted.split()) <= CLUSTER
    assert "GraceTime" in PARTITION
    assert set(OURS) <= CLUSTER
    assert len({key.lower() for key in CLUSTER}) == len(CLUSTER)
