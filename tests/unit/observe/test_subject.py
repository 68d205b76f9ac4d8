"""`explain RUN NODE` and `explain RUN CHECKPOINT`: why a node is out, why a checkpoint was skipped, from records alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_resilience.cli import main
from slurm_resilience.errors import ExitCode
from slurm_resilience.observe.events import EventWriter, read_events
from slurm_resilience.observe.subject import checkpoint, node
from tests.unit.observe import a_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return a_run.write(tmp_path / "run")


def after_loss(folder: Path) -> Path:
    """n3 is lost, n4 was drained, n5 is a spare; two ranks crashed on n2, which is left out for it."""
    run = a_run.ARun(folder)
    run.allocate(["n1", "n2", "n3", "n4", "n5"], 1.0)
    run.launch(["n1", "n2", "n3", "n4"])
    run.train(30)
    run.fault("node_lost", "n3", 4.1, "silent for 4.1 s")
    run.say("node_drained", 0.1, node="n4", reason="alice: memory", policy="checkpoint_and_move")
    run.say(
        "decided", action="launch", reason="1 nodes (at least 1); n2 is left out: 2 crashes began there, and none elsewhere"
    )
    run.launch(["n1"])
    run.train(40)
    run.close()
    return folder


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("n1", "It is in: attempt 2 has ranks on it."),
        (
            "n2",
            (
                "It is out since attempt 2: n2 is left out: 2 crashes began there, and none elsewhere. "
                "`slurm-resilience nodes forgive RUN n2` takes it back."
            ),
        ),
        ("n3", "It is out since attempt 2: its agent was given up: silent for 4.1 s."),
        ("n4", "It is out since attempt 2: somebody drained it: alice: memory (on_drain: checkpoint_and_move)."),
        ("n5", "It is a spare: its agent is warm, and attempt 2 runs on 1 other nodes."),
    ],
)
def test_why_a_node_is_out(tmp_path: Path, name: str, verdict: str) -> None:
    found = node(read_events(after_loss(tmp_path / "r")), name)
    assert found is not None
    assert found.verdict == verdict


def test_a_node_of_an_earlier_allocation_and_one_that_nobody_names(run_dir: Path) -> None:
    with_next = list(read_events(run_dir))
    next_one = {"v": 1, "seq": 9999, "t": 1.9e9, "restart": 2, "attempt": 4, "event": "allocation_started", "nodes": ["m1"]}
    found = node([*with_next, next_one], "n3")
    assert found is not None
    assert found.verdict.startswith("It is not among the nodes of the last allocation: the run is on")
    assert "m1" in found.verdict
    assert node(with_next, "n9") is None


@pytest.mark.parametrize(
    ("word", "name", "verdict"),
    [
        ("190", "step-00000190", "It is skipped: it was quarantined, because probe loss: expected 2.34"),
        ("step-0000018", "step-00000180", "It was trusted: attempt 4 resumed from it."),
        ("40", "step-00000040", "Nothing speaks against it"),
    ],
)
def test_why_a_checkpoint_was_skipped(run_dir: Path, word: str, name: str, verdict: str) -> None:
    found = checkpoint(read_events(run_dir), word)
    assert found is not None
    assert found.name == name
    assert found.verdict.startswith(verdict)


def test_a_save_that_was_given_up_and_one_that_never_was(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, restart=0)
    writer.write("checkpoint_failed", step=7, error="No space left on device")
    writer.close()
    found = checkpoint(read_events(tmp_path), "7")
    assert found is not None
    assert found.verdict == "It was never committed."
    assert found.said[0][2] == "a save of step 7 was given up: No space left on device"
    assert checkpoint(read_events(tmp_path), "8") is None


def test_the_command_finds_the_run_and_says_it_in_sixty_columns(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(run_dir.parent)
    for words in ([str(run_dir), "n3"], ["n3"]):
        assert main(["explain", *words]) == ExitCode.OK
        out = capsys.readouterr().out
        assert "its agent was given up: silent for 4.1 s" in " ".join(out.split())
        assert max(map(len, out.splitlines())) <= 60
    assert main(["explain", str(run_dir), "190", "--json"]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["name"]) == ("checkpoint", "step-00000190")


def test_a_checkpoints_own_folder_names_its_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_dir / "checkpoints" / "step-00000180"
    folder.mkdir(parents=True)
    assert main(["explain", str(folder)]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "attempt 4 resumed from it" in out
    assert "no longer in the checkpoint root" in " ".join(out.split())


def test_words_that_mean_nothing_are_refused(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "nowhere"]) == ExitCode.CONFIG_ERROR
    assert "neither a run nor a node or checkpoint" in capsys.readouterr().err
    assert main(["explain", str(run_dir), "n33"]) == ExitCode.CONFIG_ERROR
    assert "names no node and no checkpoint 'n33'" in capsys.readouterr().err
    assert main(["explain", str(run_dir), "n3", "--incident", "1"]) == ExitCode.CONFIG_ERROR
