"""``plan ettr``, ``plan interval`` and ``plan replay`` as others script against them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from slurm_resilience.cli import main
from slurm_resilience.plan.chart import sparkline
from tests.unit.observe.test_accounts import FakeRun


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def test_ettr_has_the_documented_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--nodes",
        "2000",
        "--rate",
        "6.5e-3",
        "--interval-min",
        "60",
        "--restart-min",
        "5",
        "--queue-min",
        "0",
        "--save-min",
        "0",
    ]
    document = json.loads(run(capsys, "ettr", *words, "--json"))
    assert document["ettr"] == pytest.approx(0.70, abs=0.02)
    assert document["closed_form"] == pytest.approx(0.684, abs=5e-4)
    assert document["exact"] == pytest.approx(0.720, abs=5e-4)
    assert document["simulated"] == pytest.approx(document["exact"], rel=0.01)
    assert document["mttf_h"] == pytest.approx(24 / 13)


def test_ettr_by_gpus_and_by_thousand_node_days(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(capsys, "ettr", "--gpus", "16384", "--rate", "6.5", "--save-min", "0.5", "--json"))
    assert (document["nodes"], document["rate_per_node_day"]) == (2048, pytest.approx(6.5e-3))
    assert document["mttf_h"] == pytest.approx(1.803, rel=1e-3)
    assert document["best_interval_min"] < document["interval_min"]


def test_ettr_for_reading_and_as_a_chart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chart = tmp_path / "a 'chart';.svg"
    out = run(capsys, "ettr", "--nodes", "64", "--interval-min", "30", "--svg", str(chart))
    assert "bad fleet" in out
    assert "64 nodes, 6.5 failures per 1,000 node-days: one every 2.4 d" in out
    lines = ElementTree.parse(chart).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3


def test_interval(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["interval", "--nodes", "1500", "--rate", "6.5e-3", "--save-min", "5"]
    document = json.loads(run(capsys, *words, "--json"))
    assert document["young_min"] == pytest.approx(38.43, abs=0.01)
    assert document["daly_min"] == pytest.approx(33.43, abs=0.01)
    assert document["interval_min"] == document["exact_min"] == pytest.approx(35.17, abs=0.01)
    assert max(value for _, value in document["curve"]) == document["exact"]
    out = run(capsys, *words, "--svg", str(tmp_path / "chart.svg"))
    assert out.startswith("Save every 35.2 min")
    ElementTree.parse(tmp_path / "chart.svg")


def test_replay_of_a_csv(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("t_h,cause\n0,start\n10,node_lost\n20,rank_crash\n21,hang\n40,preemption\n72,end\n")
    document = json.loads(run(capsys, "replay", str(trace), "--nodes", "64", "--json"))
    stock, ours = document["policies"]["stock"], document["policies"]["ours"]
    assert (stock["requeues"], ours["requeues"], document["policies"]["ours_full_size"]["requeues"]) == (4, 1, 2)
    assert ours["ettr"] > stock["ettr"]
    assert document["ettr"] == ours["ettr"]
    assert document["measured"] is None
    assert "stock Slurm" in run(capsys, "replay", str(trace), "--nodes", "64")


@pytest.mark.parametrize("give", ["folder", "file"])
def test_replay_of_a_run_gives_its_measured_ettr(give: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lived = FakeRun(every=10, total=500)
    lived.launch(lived.START_S)
    for steps, what in ((125, "crash"), (99, "preempt"), (133, "batch_host_dies")):
        lived.train(steps)
        getattr(lived, what)()
    lived.train(10**6)
    events = tmp_path / "events.jsonl"
    events.write_text("".join(json.dumps(event) + "\n" for event in lived.events))
    where = tmp_path if give == "folder" else events
    document = json.loads(run(capsys, "replay", str(where), "--json"))
    assert document["ettr"] == pytest.approx(lived.kept_s / (lived.t - 1000.0), rel=0.02)
    assert document["measured"]["ettr"] == document["ettr"]
    assert document["complete"] is True
    assert document["parameters_s"]["save_s"] == pytest.approx(3.0)
    assert run(capsys, "replay", str(where)).splitlines()[2].startswith("measured")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ettr", "--nodes", "4"], 78, "no checkpoint interval"),
        (["ettr", "--interval-min", "5"], 78, "Give the size of the job once"),
        (["ettr", "--nodes", "4", "--gpus", "4", "--interval-min", "5"], 78, "Give the size of the job once"),
        (["ettr", "--nodes", "4", "--interval-min", "-5"], 64, "not a number of minutes"),
        (["ettr", "--nodes", "4", "--interval-min", "5", "--rate", "bda"], 78, "did you mean 'bad'"),
        (["ettr", "--nodes", "4", "--interval-min", "5", "--seed", "-1"], 64, "is not at least"),
        (["ettr", "--nodes", "4", "--interval-min", "5", "--shape", "0.01"], 78, "give a shape of 0.1 or more"),
        (["ettr", "--nodes", "4", "--interval-min", "5", "--shape", "nan"], 78, "makes no sense"),
        (["ettr", "--nodes", "1000000000000", "--interval-min", "5"], 78, "too many to simulate"),
        (["interval", "--nodes", "4"], 78, "a save costs nothing"),
        (["interval", "--nodes", "4", "--save-min", "1", "--svg", "/nowhere/x.svg"], 78, "Cannot write the chart"),
        (["replay", "/nowhere/trace.csv"], 78, "Cannot read the trace"),
        (["replay", "/tmp"], 78, "has no events.jsonl"),
        (["replai"], 64, "did you mean 'replay'"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        got = main(["plan", *words])
    except SystemExit as end:
        got = int(end.code or 0)
    assert got == code
    assert said in capsys.readouterr().err


def test_sparklines() -> None:
    assert sparkline([0, 0.5, 1]) == "▁▅█"
    assert sparkline([3, 3]) == "██"
