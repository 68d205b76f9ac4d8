"""Each rule of the doctor: silent where all is well, and with the reason where it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm_resilience.doctor import forecast, preemption
from slurm_resilience.doctor.findings import RULES, of_site
from slurm_resilience.doctor.site import Site

LOW = {
    "PartitionName": "low",
    "PriorityTier": "1",
    "PreemptMode": "REQUEUE",
    "GraceTime": "15",
    "State": "UP",
    "MaxTime": "1-00:00:00",
}
HIGH = {"PriorityTier": "10", "PreemptMode": "OFF", "State": "UP"}
CONFIG = {
    "SLURM_VERSION": "23.11.4", "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "KillWait": "30 sec",
    "SlurmdTimeout": "300 sec", "JobRequeue": "1", "MinJobAge": "300 sec", "MaxBatchRequeue": "5", "RequeueExit": "(null)",
    "ProctrackType": "proctrack/cgroup", "AccountingStorageType": "accounting_storage/slurmdbd", "Prolog": "",
    "SchedulerParameters": "bf_interval=30", "AuthInfo": "(null)", "EpilogSlurmctld": "",
}  # fmt: skip
GOOD = Site(
    CONFIG, {"low": LOW, "high": HIGH}, "low", {"normal": {"PreemptMode": "cluster", "GraceTime": "00:00:00"}}, True, 0.2
)


def with_config(**settings: str) -> Site:
    return replace(GOOD, config={**CONFIG, **settings})


def with_partition(**settings: str) -> Site:
    return replace(GOOD, partitions={"low": {**LOW, **settings}, "high": HIGH})


BAD: list[tuple[str, str, Site]] = [
    ("preempt-cancel", "danger", with_partition(PreemptMode="CANCEL")),
    ("preempt-suspend", "danger", with_config(PreemptMode="GANG,SUSPEND")),
    ("save-does-not-fit", "danger", replace(with_partition(GraceTime="0"), config={**CONFIG, "KillWait": "5 sec"})),
    ("slurmd-timeout", "danger", with_config(SlurmdTimeout="0 sec")),
    ("slurmd-timeout", "warning", with_config(SlurmdTimeout="3600 sec")),
    ("job-requeue", "warning", with_config(JobRequeue="0")),
    ("requeueexit", "danger", with_config(RequeueExit="1,79-82")),
    ("requeueexithold", "danger", with_config(RequeueExitHold="86")),
    ("max-batch-requeue", "warning", with_config(MaxBatchRequeue="1")),
    ("max-batch-requeue", "note", with_config(SchedulerParameters="bf_interval=30,nohold_on_prolog_fail")),
    ("accounting", "warning", replace(GOOD, accounting=False, qos=None)),
    ("min-job-age", "warning", with_config(MinJobAge="10 sec")),
    ("proctrack", "warning", with_config(ProctrackType="proctrack/pgid")),
    ("proctrack", "note", with_config(ProctrackType="proctrack/linuxproc")),
    ("prolog-hold", "note", with_config(Prolog="/etc/slurm/prolog")),
    ("scheduler-pace", "warning", with_config(SchedulerParameters="bf_continue,bf_interval=300")),
    ("partition-state", "danger", with_partition(State="DRAIN")),
    ("clock-skew", "warning", replace(GOOD, skew_s=-12.0)),
    ("clock-skew", "danger", replace(GOOD, skew_s=90.0)),
    ("missing-commands", "danger", replace(GOOD, missing=("srun",))),
]


def test_silent_on_a_good_cluster() -> None:
    assert of_site(GOOD) == []
    assert of_site(GOOD, save_s=20.0) == []


@pytest.mark.parametrize(("name", "level", "site"), BAD, ids=[f"{name}-{level}" for name, level, _ in BAD])
def test_one_bad_setting_gives_one_finding(name: str, level: str, site: Site) -> None:
    if name == "preempt-suspend":
        site = replace(site, partitions={"low": {**LOW, "PreemptMode": "GANG,SUSPEND"}, "high": HIGH})
    found = of_site(site)
    assert [(finding.name, finding.level) for finding in found] == [(name, level)]
    assert found[0].evidence
    assert found[0].remedy


def test_what_a_bound_on_requeues_means_is_said_in_plain_words() -> None:
    (one,) = of_site(with_config(MaxBatchRequeue="1"))
    (five,) = of_site(with_config(SchedulerParameters="nohold_on_prolog_fail"))
    assert one.what.startswith("Once 1 launch of a job failed (a prolog, ")
    assert five.what.startswith("Once 5 launches of a job failed (a prolog, ")
    assert "preemptions and requeues by hand or by us do not count" in five.what
    assert "JobHoldMaxRequeue" in five.evidence
    assert "ask for the default" in one.remedy
    assert "ask for the default" not in five.remedy


def test_every_rule_has_a_bad_site() -> None:
    spoken = {rule for rule in RULES for _, _, site in BAD if list(rule(site, None))}
    assert spoken >= set(RULES) - {RULES[0]}  # the first is tried with the partition's own mode above


def test_a_long_save_does_not_fit_where_a_short_one_does() -> None:
    assert of_site(GOOD, save_s=25.0) == []
    (found,) = of_site(GOOD, save_s=40.0)
    assert found.name == "save-does-not-fit"
    assert "a save takes 40 s" in found.evidence


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        (GOOD, [("REQUEUE", 15)]),
        (replace(GOOD, partition="high"), [("OFF", 0)]),
        (with_config(PreemptType="preempt/none"), [("OFF", 0)]),
        (with_config(PreemptMode="OFF"), [("OFF", 0)]),
        (with_partition(PreemptMode=""), [("REQUEUE", 15)]),
        (with_config(PreemptMode="GANG,SUSPEND"), [("REQUEUE", 15)]),
        (
            replace(
                with_config(PreemptType="preempt/qos"),
                qos={
                    "a": {"PreemptMode": "cancel", "GraceTime": "00:01:30"},
                    "b": {"PreemptMode": "cluster", "GraceTime": "20"},
                    "c": {"PreemptMode": "cluster", "GraceTime": "5", "Preempt": "a,b"},
                    "d": {"PreemptMode": "within,requeue", "GraceTime": "7"},
                },
            ),
            [("CANCEL", 90), ("REQUEUE", 20), ("REQUEUE", 7)],
        ),
        (replace(with_config(PreemptType="preempt/qos"), qos={"normal": {"PreemptMode": "cluster"}}), [("OFF", 0)]),
        (replace(with_config(PreemptType="preempt/qos"), qos=None), [("REQUEUE", 0)]),
    ],
)
def test_how_a_job_may_be_preempted(site: Site, expected: list[Any]) -> None:
    assert [(way.mode, way.grace_s) for way in preemption.of(site)] == expected


class TestForecast:
    """The four forecasts, with their times."""

    def test_preemption_with_the_time_that_a_save_has(self) -> None:
        told = forecast.all_of(GOOD)[0]
        assert told.seconds == {
            "warned_s": 0,
            "grace_s": 15,
            "kill_wait_s": 30,
            "save_s": 41,
            "back_s": 40,
            "slurm_alone_s": 121,
        }
        assert "less than 41 s" in told.says

    def test_a_long_credential_holds_a_requeued_job_back(self) -> None:
        assert forecast.requeue_delay_s(with_config(AuthInfo="socket=/run/munge,cred_expire=600")) == 601

    def test_a_release_with_a_delay_of_its_own(self) -> None:
        site = with_config(SLURM_VERSION="25.11.1", SchedulerParameters="requeue_delay=7")
        assert forecast.requeue_delay_s(site) == 7
        assert forecast.requeue_delay_s(with_config(SchedulerParameters="requeue_delay=7")) == 121

    def test_the_hook_on_the_controller_counts(self) -> None:
        told = forecast.all_of(with_config(EpilogSlurmctld="/opt/slurm-resilience/hooks/epilogslurmctld"))[0]
        assert told.seconds["back_s"] == 5

    def test_nobody_can_preempt_the_highest(self) -> None:
        assert "No job can preempt yours" in forecast.all_of(replace(GOOD, partition="high"))[0].says

    def test_the_warning_before_the_limit(self) -> None:
        assert forecast.all_of(GOOD, lead_s=45)[1].seconds["lead_s"] == 45

    def test_a_lost_node(self) -> None:
        assert forecast.all_of(GOOD)[2].seconds["slurm_notices_s"] == 413
        assert "never notices" in forecast.all_of(with_config(SlurmdTimeout="0 sec"))[2].says

    def test_a_failed_prolog(self) -> None:
        assert "held" in forecast.all_of(with_config(Prolog="/p"))[3].says
        free = with_config(Prolog="/p", SchedulerParameters="nohold_on_prolog_fail")
        assert "starts elsewhere" in forecast.all_of(free)[3].says
