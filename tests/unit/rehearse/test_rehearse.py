"""A rehearsal: what is refused before it starts, and what the page says about events."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.cli import main
from slurm_resilience.rehearse.stage import rehearse
from slurm_resilience.rehearse.verdict import Blow, as_dict, outcomes, page
from slurm_resilience.rehearse.wish import Wish

ABOUT = {"script": "train.py", "where": "here", "run_dir": "/run"}


def event(name: str, t: float, attempt: int = 1, restart: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event": name, "t": t, "attempt": attempt, "restart": restart, **fields}


def crash(*, fresh: bool = False, first_step: bool = True) -> list[dict[str, Any]]:
    events = [
        event("allocation_started", 0.0, nodes=["n1", "n2"]),
        event("attempt_started", 1.0, nodes=["n1", "n2"]),
        event("ranks_launched", 2.0),
        event("first_step", 3.0, step=1),
        event("checkpoint_committed", 8.0, step=5),
        event("step_reported", 9.9, step=7),
        event("fault_detected", 10.2, cause="rank_crash", since=10.0, step=7),
        event("attempt_stopped", 10.3, fault=True, cause="rank_crash", saved=False),
        event("attempt_started", 10.4, 2, nodes=["n1"]),
        event("ranks_launched", 10.5, 2),
    ]
    events += [event("started_fresh", 10.8, 2)] if fresh else [event("resumed", 10.8, 2, step=5)]
    return events + ([event("first_step", 11.0, 2, step=6)] if first_step else [])


def test_a_killed_rank() -> None:
    (one,) = outcomes([Blow("kill-rank", 10.0, "n2")], crash())
    assert one.ok
    assert (one.cause, one.noticed_s, one.back_s, one.resumed_from, one.steps_lost) == ("rank_crash", 0.2, 1.0, 5, 2)
    assert (one.work_lost_s, one.requeues, one.nodes_after) == (2.0, 0, 1)
    text = page([one], ABOUT)
    assert "it survives all of it" in text
    assert "noticed after 0.2 s as rank_crash, back after 1.0 s (first step of all ranks)" in text
    assert "lost: 2 steps, done again; no requeue, 1 node afterwards" in text


def test_a_script_without_a_run_is_judged_by_its_checkpoints() -> None:
    events = [one for one in crash(first_step=False) if one["event"] not in ("first_step", "step_reported")]
    (one,) = outcomes([Blow("kill-rank", 10.0)], events)
    assert (one.ok, one.back_s, one.steps_lost, one.work_lost_s) == (True, 0.8, None, 2.0)
    assert "lost: up to 2.0 s of work, done again" in page([one], ABOUT)
    assert one.saved_again_s is None
    (one,) = outcomes([Blow("kill-rank", 10.0)], [*events, event("checkpoint_committed", 14.0, 2, step=6)])
    assert one.saved_again_s == 3.2
    assert "back after 0.8 s (its checkpoint is in place), saved anew 3.2 s later" in page([one], ABOUT)


def test_a_script_that_trains_on_after_a_warning_stands_still_only_after_its_end() -> None:
    events = [
        event("checkpoint_committed", 8.0, step=5),
        event("warning_received", 10.0, signal="SIGUSR2"),
        event("warning_explained", 10.1, cause="time_limit"),
        event("checkpoint_committed", 68.5, step=60),
        event("attempt_stopped", 70.0, fault=False, cause="time_limit", saved=False),
        event("allocation_started", 95.0, 1, 1, nodes=["n1"]),
        event("attempt_started", 99.0, 2, 1, nodes=["n1"]),
        event("resumed", 110.0, 2, 1, step=60),
    ]
    (one,) = outcomes([Blow("time-limit", 10.0)], events)
    assert (one.back_s, one.trained_on_s, one.still_s, one.work_lost_s) == (100.0, 60.0, 40.0, 1.5)
    text = page([one], ABOUT)
    assert "trained on for 60.0 s, then stood still for 40.0 s (until its checkpoint is in place)" in text
    assert "lost: up to 1.5 s of work, done again; 1 requeue" in text


def test_a_start_from_scratch_is_no_survival() -> None:
    (one,) = outcomes([Blow("kill-rank", 10.0)], crash(fresh=True))
    assert not one.ok
    assert one.says == "it began again from scratch"
    assert "it survives 0 of 1" in page([one], ABOUT)


def test_preempted_after_a_save_nothing_is_lost() -> None:
    events = [
        event("checkpoint_committed", 8.0, step=5),
        event("warning_received", 10.0, signal="SIGTERM"),
        event("attempt_stopped", 11.0, fault=False, cause="preemption", saved=True),
        event("requeue_done", 12.0),
        event("allocation_started", 20.0, 1, 1, nodes=["n1"]),
        event("attempt_started", 21.0, 2, 1, nodes=["n1"]),
        event("resumed", 22.0, 2, 1, step=7),
        event("first_step", 23.0, 2, 1, step=8),
    ]
    (one,) = outcomes([Blow("preempt", 9.5, "job 7")], events)
    assert (one.ok, one.saved_first, one.requeues, one.back_s) == (True, True, 1, 13.5)
    assert (one.trained_on_s, one.still_s) == (1.5, 12.0)
    assert "lost: nothing, it had saved first; 1 requeue, 1 node afterwards" in page([one], ABOUT)


def test_what_was_not_dealt_says_why_and_spoils_no_other() -> None:
    blows = [Blow("kill-rank", 10.0), Blow("power-off", 0.0, failed="it could not be dealt: no such node")]
    found = outcomes(blows, crash())
    assert [one.ok for one in found] == [True, False]
    document = as_dict(found, ABOUT)
    assert (document["faults"], document["survived"], document["ok"]) == (2, 1, False)
    assert "it could not be dealt: no such node" in page(found, ABOUT)
    assert json.dumps(document)


class Deaf:
    """A job that goes on and on, and never gets a checkpoint into the run."""

    def __init__(self, run_dir: Path, events: list[dict[str, Any]], ended: str = "") -> None:
        self.run_dir, self._events, self._ended = run_dir, events, ended

    def start(self) -> None:
        (self.run_dir / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in self._events))

    def deal(self, fault: str) -> Blow:
        raise AssertionError(f"{fault} is dealt without a checkpoint")

    def mend(self, fault: str) -> None: ...
    def over(self) -> str:
        return self._ended

    def close(self) -> None: ...


def test_why_there_is_no_checkpoint_is_said_at_once_and_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("torch.save(state, 'snapshot.pt')")
    wish = Wish(tmp_path / "train.py", (), ("kill-rank",), checkpoint_file="snapshot.pt", within_s=0.3)
    told: list[str] = []
    failed = event("checkpoint_failed", time.time() + 60, error="The script saves into /there/snapshot.pt.")
    (blow,) = rehearse(Deaf(tmp_path, [failed]), wish, say=told.append)
    assert [line for line in told if "RESILIENCE_CHECKPOINT_FILE" in line], "the script says nothing of its file"
    assert told.count("a save failed: The script saves into /there/snapshot.pt.") == 1
    assert blow.failed.endswith("No sign of a new checkpoint in 0.3 s. The script saves into /there/snapshot.pt.")

    (blow,) = rehearse(Deaf(tmp_path, []), wish, say=told.append)
    assert "does the script save often enough?" in blow.failed

    end = event("run_failed", 9.0, cause="app_error", reason="your code, not the cluster (n1: RuntimeError: no such option)")
    (blow,) = rehearse(Deaf(tmp_path, [end], "job 7 is FAILED"), wish, say=told.append)
    assert (
        "The job is over before a new checkpoint: your code, not the cluster (n1: RuntimeError: no such option)" in blow.failed
    )
    assert "How we know: job 7 is FAILED" in blow.failed


@pytest.mark.parametrize(
    ("args", "resume_with", "text", "never"),
    [
        ((), "", "", True),
        (("--snapshot={checkpoint}",), "", "", False),
        ((), "--resume {checkpoint}", "", False),
        ((), "", "path = os.environ['RESILIENCE_CHECKPOINT_FILE']", False),
    ],
)
def test_whether_the_script_can_know_its_file(
    args: tuple[str, ...], resume_with: str, text: str, never: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(text)
    wish = Wish(tmp_path / "train.py", args, ("kill-rank",), checkpoint_file="a.pt", resume_with=resume_with)
    assert wish.never_told_its_file is never


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nope.py"], "There is no script"),
        (["train.py", "--faults", "kill-ranks"], "did you mean 'kill-rank'"),
        (["train.py", "--faults", ","], "No fault is asked for"),
        (["train.py", "--local", "--faults", "kill-rank,power-off"], "nobody can rehearse power-off"),
        (["train.py", "--nodes", "3-1"], "neither N nor FEWEST-MOST"),
        (["train.py", "--args", "'"], "cannot be split into words"),
        (["notes.txt"], "neither a Python script nor a batch script"),
        (["job.sbatch", "--args", "x"], "says itself how it is run"),
        (["job.sbatch", "--local", "--faults", "kill-rank"], "in the sandbox only"),
    ],
)
def test_nonsense_is_refused(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("train.py", ""), ("notes.txt", "hello"), ("job.sbatch", "#!/bin/bash\n#SBATCH --nodes=1\n")):
        Path(name).write_text(text)
    assert main(["rehearse", *words]) == 78
    assert says in capsys.readouterr().err
