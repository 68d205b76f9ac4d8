"""Checkpoints that no file check can tell from good ones, found by a job that nobody watches."""

from __future__ import annotations

import math
import os
import pwd
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.observe.events import read_events
from slurm_resilience.sandbox import Sandbox
from tests.slurm.test_drained import ENDLESS, newest
from tests.slurm.test_faults import SlurmRun

sys.path.append(os.fspath(Path(__file__).parents[1] / "unit"))
from training.forge import Forgery, forged


def hand_over(folder: Path, name: str) -> None:
    """What root has forged is alice's again: otherwise the files would be refused for their owner."""
    account = pwd.getpwnam(name)
    for path in [folder, *folder.rglob("*")]:
        os.lchown(path, account.pw_uid, account.pw_gid)


def wrong_learning_rate(it: Forgery) -> None:
    it.plain["optimizers"]["optimizer"]["groups"][0]["numbers"]["lr"] *= 2
    it.plain["lr"]["optimizer"] = [2 * rate for rate in it.plain["lr"]["optimizer"]]


def not_a_number(it: Forgery) -> None:
    it.tensors[next(key for key in it.tensors if key.endswith("exp_avg_sq"))].view(-1)[0] = math.nan


def flipped_bit(it: Forgery) -> None:
    it.tensors[next(key for key in it.tensors if key.endswith("qkv.weight"))].view(torch.int32)[3, 4] ^= 1


def zeroed_moment(it: Forgery) -> None:
    it.tensors[next(key for key in it.tensors if key.endswith("exp_avg_sq"))].zero_()


# what is done to the newest and to the next older checkpoint, whether the state digest is made anew, too, and what is said
PAIRS = [
    pytest.param(
        [(wrong_learning_rate, True, "learning rate of optimizer"), (not_a_number, True, "not finite")], id="rate-and-nan"
    ),
    pytest.param(
        [(flipped_bit, False, "qkv.weight"), (zeroed_moment, False, "exp_avg_sq")],
        id="bit-and-moment",
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.timeout(900)
def test_a_requeued_job_passes_over_two_bad_checkpoints_in_one_go(
    pair: list[tuple[Callable[[Forgery], None], bool, str]], sandbox: Sandbox, shared: Path
) -> None:
    run = SlurmRun(sandbox, shared, ENDLESS, nodes="2")
    store = CheckpointStore.open(run.run_dir / "checkpoints")
    sandbox.wait_for(lambda: len(store.entries()) >= 3, 400, what="three checkpoints")
    sandbox.slurm(["scontrol", "requeue", run.job])
    sandbox.wait_for(lambda: sandbox.job_state(run.job) == "PENDING", 120, what="the requeue")
    good, older, newer = sorted((entry for entry in store.entries() if entry.usable), key=lambda entry: entry.order)[-3:]
    for entry, (forge, digest, _) in zip((newer, older), pair, strict=True):
        with forged(store.root, step=entry.step, digest=digest) as it:
            forge(it)
    hand_over(store.root, "alice")
    at = time.time()
    sandbox.slurm(["scontrol", "update", f"JobId={run.job}", "StartTime=now"])
    sandbox.wait_for(lambda: newest(run, "first_step", at), 300, what="the first step from a good checkpoint")
    since = [event for event in read_events(run.run_dir) if float(event["t"]) >= at]
    condemned = [(event["step"], event["reason"]) for event in since if event["event"] == "checkpoint_quarantined"]
    assert [step for step, _ in condemned] == [newer.step, older.step]
    for (_, reason), (_, _, words) in zip(condemned, pair, strict=True):
        assert words in reason
    (resumed,) = [event for event in since if event["event"] == "resumed"]
    assert resumed["step"] == good.step
    assert [event["event"] for event in since].count("attempt_started") == 1, "in one go"
    sandbox.exec(["scancel", run.job], check=True)
