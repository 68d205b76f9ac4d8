"""Every view of a run tells the same of its incidents: log, events, status, explain, report, metrics, traces and replay."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.cli import main
from slurm_resilience.observe.accounts import account
from slurm_resilience.observe.events import read_events, read_for_standing
from slurm_resilience.observe.incidents import Incidents, steps_done_again
from slurm_resilience.observe.narrator import Narrator
from slurm_resilience.observe.report.page import headline, render, tiles
from slurm_resilience.observe.report.story import read
from slurm_resilience.observe.run_metrics import RunMetrics
from slurm_resilience.observe.standing import Standing, look_for_supervisor
from tests.unit.observe import recordings

# Cause, steps done again and seconds from the fault to where it had struck, of each incident; what was ended on purpose apart.
RIGHT: dict[str, list[tuple[str, int | None, float | None]]] = {
    "quiet": [],
    "two_crashes": [("rank_crash", 8, 6.9752), ("rank_crash", 8, 2.5196)],
    "supervisor_killed": [("supervisor_lost", 8, 50.2742), ("supervisor_lost", 0, None)],
    "requeued": [("unknown", 0, 17.2746)],
    "shrunk_and_grown": [("node_lost", 0, 5.0277)],
    "sigterm": [],
    "scancel": [],
}
CANCELLED = ("sigterm", "scancel")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", recordings.ALL)
def test_all_views_agree(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recordings.folder(name, tmp_path / "run")
    told = {
        "events": said(capsys, "events", str(folder), "--incidents"),
        "status": said(capsys, "status", str(folder))["incidents"],
        "explain": said(capsys, "explain", str(folder))["incidents"],
        "report": [incident.as_dict() for incident in read(folder).incidents],
    }
    for view, incidents in told.items():
        seen = [(one["cause"], one["steps_lost"], one["phases"].get("caught_up")) for one in incidents if one["fault"]]
        assert seen == RIGHT[name], view
        assert [one["cause"] for one in incidents if not one["fault"]] == ["cancelled"] * (name in CANCELLED), view
    assert [one["number"] for one in told["explain"]] == [one["number"] for one in told["status"]]
    again = sum(lost or 0 for _, lost, _ in RIGHT[name])
    metrics = RunMetrics("r")
    for event in read_events(folder):
        metrics.apply(event)
    rows = {(row, labels): value for row, labels, value in metrics.rows()}
    assert rows["steps_lost_total", ()] == again
    counted = {labels[0]: value for (row, labels), value in rows.items() if row == "incidents_total"}
    assert counted == {cause: sum(one[0] == cause for one in RIGHT[name]) for cause, _, _ in RIGHT[name]}
    shown = dict(reversed(tile[:2]) for tile in tiles(read(folder)))["steps done again"]
    assert shown == str(again) or (shown, again) == ("< 1", 0)  # where a part of a step was
    assert read(folder).steps_lost == again == steps_done_again(Incidents.of(read_for_standing(folder)))
    # the log: the same cause and number of steps in the line that tells of coming back
    narrator = Narrator()
    lines = [line for event in read_events(folder) for line in narrator.lines(event) if "recovered from" in line]
    back = [re.search(r"recovered from (\w+).*?(?:; (\d+) steps? to do again)?$", line) for line in lines]
    assert [(found[1], int(found[2] or 0)) for found in back if found] == [
        (cause, lost) for cause, lost, caught_up in RIGHT[name] if caught_up is not None
    ]
    replayed = said(capsys, "plan", "replay", str(folder))
    assert replayed["ettr"] == read(folder).account.ledger.ettr, "one answer"
    assert replayed["policies"]["as_it_was"]["ettr"] == pytest.approx(replayed["ettr"], rel=0.02)
    # the replay: without the supervisor that nobody missed
    stopped = [failure.cause for failure in account(read_events(folder)).trace.failures]
    assert stopped == [cause for cause, _, caught_up in RIGHT[name] if caught_up is not None]


def test_the_broad_line_of_the_loss_is_as_long_as_what_was_done_again(tmp_path: Path) -> None:
    story = read(recordings.folder("supervisor_killed", tmp_path / "run"))
    first, _ = story.curves
    assert sum(step > first.kept_to for step in first.steps) == story.steps_lost == 8


@pytest.mark.parametrize("name", CANCELLED)
def test_a_cancel_is_an_ending_and_no_fault(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recordings.folder(name, tmp_path / "run")
    story = read(folder)
    assert headline(story).startswith("Ended on purpose at step ")
    assert "without an incident" in headline(story)
    assert ("0", "incidents") in [tile[:2] for tile in tiles(story)]
    assert "did not come back" not in render(story, now=0.0)
    assert main(["explain", str(folder)]) == 0
    page = capsys.readouterr().out
    assert page.startswith("Ended on purpose: cancelled")
    assert main(["status", str(folder)]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "now cancelled: cancelled (" in screen
    assert "incidents none" in screen
    narrator = Narrator()
    lines = [line for event in read_events(folder) for line in narrator.lines(event)]
    assert sum("the run ends here" in line for line in lines) == 1
    assert lines[-1].endswith("run ended (exit code 86); started again in this folder, it goes on")
    assert any("asking Slurm" in line for line in lines) is (name == "scancel")


@pytest.mark.parametrize(
    ("job", "silent_s", "doing", "words"),
    [
        ("local", 2.0, "training", "on 2 ranks"),
        ("local", 6.0, "training", "no sign of its supervisor for 6.0 s: if it is dead, start the same command again"),
        ("local", 12.0, "unsupervised", "start the same command again"),
        ("7", 12.0, "training", "no sign of its supervisor for 12 s: if it is dead, its batch script starts another one"),
        ("7", 40.0, "unsupervised", "submit again with the same --run-dir"),
    ],
)
def test_a_supervisor_of_which_there_is_no_sign(tmp_path: Path, job: str, silent_s: float, doing: str, words: str) -> None:
    events = [event for event in recordings.events("two_crashes") if event["t"] < recordings.events("two_crashes")[0]["t"] + 11]
    standing = Standing.of({**event, "job_id": job} if event["event"] == "allocation_started" else event for event in events)
    (tmp_path / "pulse").write_text("1 1")
    os.utime(tmp_path / "pulse", (1000.0, 1000.0))
    look_for_supervisor(standing, tmp_path, now=1000.0 + silent_s)
    assert standing.doing == doing
    assert words in standing.because
    assert standing.silent_s == (None if silent_s < 4 else silent_s)


def test_watching_a_run_that_nobody_looks_after_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    recordings.folder("two_crashes", folder)
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(lines[:40]))
    (folder / "pulse").write_text("1 1")
    os.utime(folder / "pulse", (1000.0, 1000.0))
    assert main(["status", str(folder), "--watch"]) == 0
    assert "start the same command again" in capsys.readouterr().out


def test_without_slurm_and_without_a_name_the_runs_below_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 78
    assert "There is no Slurm here, and no run" in capsys.readouterr().err
    recordings.folder("two_crashes", tmp_path / "resilience-runs" / "local")
    recordings.folder("sigterm", tmp_path / "other")
    assert main(["status"]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "complete" in screen
    assert "cancelled" in screen
    assert {Path(one["run_dir"]).name for one in said(capsys, "status")} == {"local", "other"}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "squeue").chmod(0o755)
    assert main(["status"]) == 0
    captured = capsys.readouterr()
    assert "Slurm does not answer" in captured.err
    assert "cancelled" in captured.out


def test_a_loss_that_is_no_number_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recordings.folder("quiet", tmp_path / "run")
    text = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(re.sub(r'"loss": [\d.]+', '"loss": NaN', text))
    for words in (["status", str(folder)], ["events", str(folder)], ["explain", str(folder)]):
        assert main([*words, "--json"]) == 0
        out = capsys.readouterr().out
        json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert "NaN" in (folder / "events.jsonl").read_text()


def test_a_number_that_is_no_step_may_be_an_incident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recordings.folder("two_crashes", tmp_path / "run")
    assert main(["explain", str(folder), "2"]) == 78
    assert "--incident 2" in capsys.readouterr().err


def test_figures_of_others_stand_in_the_comparison_as_in_the_report() -> None:
    from slurm_resilience.observe.references import REFERENCES

    page = (Path(__file__).parents[3] / "docs" / "explanation" / "comparison.md").read_text()
    for one in REFERENCES:
        assert f"{one.seconds:g} s" in page, one
