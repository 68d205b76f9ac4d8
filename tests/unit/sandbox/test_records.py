"""What scontrol prints, read field by field."""

from __future__ import annotations

import pytest

from slurm_resilience.sandbox.records import fields, in_service, in_touch

JOB = (
    "JobId=3 JobName=my job=x UserId=alice(1001) Nice=0 Account=(null) JobState=RUNNING Reason=None Requeue=1 Restarts=0 "
    "PreemptTime=None Comment=a b c  TRES=cpu=8,node=4 MinCPUsNode=1 Command=/tmp/with space/l.sh Socks/Node=* "
    "NtasksPerN:B:S:C=0:0:*:*"
)


def test_values_with_spaces_and_equals_signs() -> None:
    job = fields(JOB)
    assert job["JobId"] == "3"
    assert job["Comment"] == "a b c"
    assert job["TRES"] == "cpu=8,node=4"
    assert job["Command"] == "/tmp/with space/l.sh"
    assert job["NtasksPerN:B:S:C"] == "0:0:*:*"
    assert job["PreemptTime"] == "None"


def test_nothing_is_nothing() -> None:
    assert fields("") == {}
    assert fields("No jobs in the system") == {}


@pytest.mark.parametrize(
    ("word", "touch", "service"),
    [
        ("IDLE", True, True),
        ("ALLOCATED+COMPLETING", True, True),
        ("IDLE+DRAIN", True, False),
        ("DOWN", True, False),
        ("DOWN*", False, False),
        ("IDLE+NOT_RESPONDING", False, False),
        ("UNKNOWN", False, False),
        ("", False, False),
    ],
)
def test_words_for_a_node_s_state(word: str, touch: bool, service: bool) -> None:
    assert (in_touch(word), in_service(word)) == (touch, service)
