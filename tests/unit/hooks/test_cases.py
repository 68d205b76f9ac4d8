"""Each failure that other projects have had reported, and the test that holds it: none of them may vanish unnoticed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
SLURM, CHECKS, SURVIVAL, ADMIN, WORDS, BUDGET = (
    "slurm/test_hooks.py", "unit/hooks/test_checks.py", "unit/hooks/test_survival.py", "unit/hooks/test_admin.py",
    "unit/hooks/test_words.py", "unit/hooks/test_budget.py",
)  # fmt: skip
CASES = [
    ("an admin's drain stays (nhc#134)", SLURM, "an_admins_drain_is_neither_replaced_nor_returned"),
    ("it lands between our read and our return", SLURM, "an_admins_drain_between_our_read_and_our_return_is_back_after_us"),
    ("it lands between our read and our drain", SLURM, "an_admins_drain_between_our_read_and_our_drain_is_back_after_us"),
    ("a pending reboot is not cancelled (nhc#81, #115)", SLURM, "a_pending_reboot_is_not_cancelled_by_our_return"),
    ("a drain of a rebooting node holds after it", SLURM, "a_drain_set_while_the_node_reboots_holds_after_it"),
    ("a dead controller (nhc#161)", SLURM,
     "a_dead_controller_delays_no_epilog_beyond_its_deadline_and_the_verdict_is_acted_on_later"),
    ("a slow controller", SURVIVAL, "a_controller_that_hangs_delays_by_one_bounded_call_and_the_verdict_is_kept"),
    ("a check that sleeps past its limit (nhc#95)", SLURM, "a_check_that_sometimes_sleeps_past_its_limit_flaps_nothing"),
    ("no scontrol, no PATH (nhc#147, deepops#919)", SLURM, "scontrol_that_is_not_where_the_configuration_says_is_said_aloud"),
    ("NodeName is not the hostname (nhc#19)", SURVIVAL, "a_name_that_is_none_is_refused"),
    ("planned, powering and rebooting nodes (nhc#36)", SLURM, "a_rebooting_node_is_not_drained_but_looked_at_again_afterwards"),
    ("their states", WORDS, "state_words"),
    ("two jobs of a user, one ends (deepops#992, #1407)", SLURM, "two_jobs_of_one_user_and_one_ends"),
    ("the other one is suspended or configuring (deepops#1408)", CHECKS,
     "files_stay_while_another_job_of_the_user_may_be_there"),
    ("squeue fails (slurm#171)", CHECKS, "files_stay_while_another_job_of_the_user_may_be_there"),
    ("ann and joann", CHECKS, "users_are_numbers_so_that_ann_is_not_joann"),
    ("a README in prolog.d (ubuntu-slurm#4)", ADMIN, "what_would_drain_nodes_is_said_before_slurm_does_it"),
    ("nohold_on_prolog_fail (hpcfund#69)", SLURM, "a_prolog_that_fails_on_every_node_stops_at_the_budget_and_jobs_run"),
    ("a file that root cannot delete", SLURM, "a_hostile_job_drains_nothing_and_runs_nothing_as_root"),
    ("a file that root may not delete", CHECKS, "a_file_that_even_root_cannot_delete_is_the_jobs_fault"),
    ("a hung dcgmi or nvidia-smi (cluster-toolkit#6230)", SURVIVAL, "a_check_that_hangs_costs_its_time_and_no_more"),
    ("XIDs: last week's, an application's, noise, a user's, nonfatal, unknown", CHECKS, "a_check_answers"),
    ("an XID counts once (azurehpc#648)", CHECKS,
     "an_xid_counts_once_and_lasts_until_the_driver_says_that_nothing_is_needed"),
    ("--comment=skip_checks, a job named hc_x, LD_PRELOAD, $(…)", SURVIVAL, "what_a_job_says_is_nowhere_code"),
    ("a reason is sanitised", WORDS, "a_reason_is_one_short_line_that_no_shell_or_parser_trips_over"),
    ("a symlink at a predictable name (slurm-gcp#223)", CHECKS, "leftovers_in_shared_memory_go_without_following_anything"),
    ("a renamed check (soperator#2773)", WORDS, "a_check_that_was_renamed_is_still_ours"),
    ("slurmd killed in mid-epilog", SLURM, "slurmd_killed_in_the_middle_of_an_epilog_loses_no_verdict"),
    ("/proc/cpuinfo of 20,000 CPUs (nhc#30)", CHECKS, "a_check_answers"),
    ("a check fails on three of four nodes (NVSentinel#1228, #1686)", SLURM,
     "the_same_check_on_three_of_four_nodes_suspects_the_check"),
    ("return works while the budget is spent", SLURM, "a_check_that_fails_everywhere_at_once_drains_at_most_the_budget"),
    ("0:0 is no evidence", SURVIVAL, "zero_zero_is_no_evidence_and_a_code_is_written_down"),
    ("a format that nobody knows (autopilot#68), an idle GPU (slurm-gcp#223)", CHECKS, "a_check_answers"),
    ("a clock that jumps", SURVIVAL, "a_clock_that_jumps_is_recorded_and_nothing_else"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "file", "test"), CASES, ids=[case for case, _, _ in CASES])
def test_the_case_has_its_test(case: str, file: str, test: str) -> None:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert f"test_{test}" in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, case
