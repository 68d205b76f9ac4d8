"""The report of a run: what it tells, that it needs nothing but itself, and how a real browser lays it out."""

from __future__ import annotations

import html
import itertools
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slurm_resilience.cli import main
from slurm_resilience.errors import ExitCode
from slurm_resilience.observe.report import figures, thinning
from slurm_resilience.observe.report.page import headline, render, tiles
from slurm_resilience.observe.report.story import Curve, curves, read, recoveries
from tests.unit.observe.a_run import ARun, write

VOID = {"meta", "br", "link", "img", "input", "hr"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def page(run_dir: Path) -> str:
    return render(read(run_dir), now=0.0)


class Outline(HTMLParser):
    """The tags that are open, and every address that the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "data", "poster", "action")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_fetches_nothing(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert outline.fetched == []
    assert "url(" not in page
    assert "<script" not in page  # also not the one in the reason of a bad checkpoint


def test_what_the_page_tells(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    text = " ".join(" ".join(outline.text).split())
    for words in (
        "Complete at step 260",
        "through 3 incidents",
        "3 of 3",
        "30 steps done again since the last checkpoint",
        "rank_crash (n2, rank 1)",
        "node_lost (n3)",
        "preemption",
        "silent for 4.1 s",
        "quarantined: probe loss: expected 2.34, measured 9.1 <script>",
        "python train.py --lr <3e-4>",
        "10 min, Slurm's own requeue",
        "without us, measured elsewhere",
        "It cannot be compared one to one with this run",
    ):
        assert words in text, words


def test_every_figure_is_xml_with_a_name_and_a_description(page: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 3 + 3  # timeline, loss, shares, and the phases of each incident
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert root.get("role") == "img"
        assert len(root.get("aria-label", "")) > 20


def test_the_time_adds_up(run_dir: Path) -> None:
    story = read(run_dir)
    assert story.account.ledger.unaccounted_s == pytest.approx(0.0, abs=1e-6)
    spans = story.account.spans
    assert sum(span.end - span.start for span in spans) == pytest.approx(story.end - story.start)
    assert all(before.end == after.start for before, after in itertools.pairwise(spans))


def test_attempts_and_why_they_ended(run_dir: Path) -> None:
    attempts = read(run_dir).attempts
    assert [attempt.number for attempt in attempts] == [1, 2, 3, 4]
    assert [attempt.end_cause for attempt in attempts] == ["rank_crash", "node_lost", "preemption", "finished"]
    assert [attempt.world for attempt in attempts] == [4, 4, 3, 4]
    assert [attempt.from_step for attempt in attempts] == [0, 60, 120, 180]


def test_steps_that_were_done_again_are_told_apart(run_dir: Path) -> None:
    kept = {curve.attempt: curve.kept_to for curve in read(run_dir).curves}
    assert kept == {1: 60, 2: 120, 3: 180, 4: float("inf")}
    assert 'class="again"' in figures.curve(read(run_dir))


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    curve = Curve(1)
    for step in range(1, 1_000_001):
        curve.add(step, 1 / step)
    assert len(curve.steps) < 4000
    assert curve.steps[0] == 1
    assert curve.steps[-1] > 999_000
    assert [1 / step for step in curve.steps] == curve.losses


def test_lines_without_a_loss_and_torn_ones_are_passed_over(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "attempt": 1, "loss": "nan"}',
        '{"step": 2, "attempt": 1}',
        "[1]",
        '{"step": 3, "attempt": 1, "loss": 2}',
        '{"st',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [(one.steps, one.losses) for one in curves(tmp_path / "metrics.jsonl")] == [([3], [2.0])]
    assert curves(tmp_path / "none") == []


def test_times_of_recovery_per_cause(run_dir: Path) -> None:
    found = {one.cause: one for one in recoveries(read(run_dir).incidents)}
    assert set(found) == {"rank_crash", "node_lost", "preemption"}
    lost = found["node_lost"]
    assert (lost.count, lost.recovered) == (1, 1)
    assert lost.median == lost.p95 == lost.longest == pytest.approx(5.3, abs=0.5)


@pytest.mark.parametrize("keep", [1, 2, 5, 9, 13, 40, 90])
def test_a_run_that_is_still_going_on_has_a_page_at_any_moment(run_dir: Path, tmp_path: Path, keep: int) -> None:
    lines = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_text("".join(lines[:keep]))
    story = read(tmp_path)
    assert re.match(r"[A-Z][a-z]+ at step \d+ after ", headline(story))
    Outline().feed(render(story))


def test_the_command(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir), "-o", str(tmp_path / "r.html")]) == ExitCode.OK
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert "Complete at step 260" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == ExitCode.CONFIG_ERROR
    assert "nothing to report" in capsys.readouterr().err


def test_without_a_name_the_page_goes_beside_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("one", "two"):
        assert main(["report", str(write(tmp_path / name))]) == ExitCode.OK
        out = capsys.readouterr()
        assert out.out.endswith(f"\n{tmp_path / name / 'report.html'}\n")
        assert out.err == ""
    assert list(Path().iterdir()) == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    for said in ("report.html is written here", "report.html is replaced"):
        assert main(["report", str(tmp_path / "one")]) == ExitCode.OK
        assert said in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["report.html"]


def test_a_script_that_tells_no_step_is_complete_at_none(tmp_path: Path) -> None:
    run = ARun(tmp_path / "run")
    run.allocate(["n1"], 1.0)
    run.launch(["n1"])
    run.say("run_completed", 1.0)
    run.close()
    assert headline(read(run.folder)).startswith("Complete after ")


def test_part_of_a_step_that_was_done_again_is_not_called_none(tmp_path: Path) -> None:
    run = ARun(tmp_path / "run")
    run.allocate(["n1"], 1.0)
    run.launch(["n1"])
    run.train(20)
    run.t += 0.3  # in the next step
    run.fault("rank_crash", "n1", 0.1, "killed by signal 9", rank=0)
    run.launch(["n1"])
    run.train(30)
    run.say("run_completed", step=30)
    run.close()
    story = read(run.folder)
    assert (story.steps_lost, story.account.ledger.lost_s > 0) == (0, True)
    assert [value for value, name, _ in tiles(story) if name == "steps done again"] == ["< 1"]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 86_400), (3, 3), (0.1, 0.13), (1, 1000)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = figures.ticks(low, high)
    assert 1 <= len(found) <= 11
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)


MEASURE = """<!doctype html><body><iframe style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe><script>
onload = () => {{
  const d = document.querySelector("iframe").contentDocument, r = d.documentElement, style = getComputedStyle(d.body);
  const bar = d.querySelector("svg .k-training").getBoundingClientRect(), tiles = d.querySelectorAll(".tiles li").length;
  const seen = {{wide: r.scrollWidth, seen: r.clientWidth, page: style.backgroundColor, ink: style.color,
    bar: bar.width * bar.height, tiles}};
  document.body.innerHTML = "<pre>" + JSON.stringify(seen) + "</pre>";
}};
</script></body>"""


def chromium() -> str:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""


def brightness(colour: str) -> float:
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.skipif(not chromium(), reason="not run: there is no Chromium here")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 1200])
def test_in_a_real_browser(page: str, tmp_path: Path, width: int, dark: bool) -> None:
    """On a phone and on a screen, light and dark: nothing sticks out, and ink is told from paper."""
    (tmp_path.parent / "measure.html").write_text(MEASURE.format(width=width, page=html.escape(page)))
    command = [chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path.parent / 'profile'}"]
    command += ["--force-dark-mode"] * dark + ["--dump-dom", (tmp_path.parent / "measure.html").as_uri()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=True, env={**os.environ, "HOME": str(tmp_path.parent)}
    )
    seen = json.loads(re.search(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)[1])  # type: ignore[index]
    assert seen["wide"] <= seen["seen"]
    assert seen["tiles"] == 5
    assert seen["bar"] > 20
    assert (brightness(seen["page"]) < 80) is dark
    assert abs(brightness(seen["page"]) - brightness(seen["ink"])) > 120


@pytest.mark.parametrize("where", ["its own folder", "elsewhere"])
def test_a_checkpoint_that_was_removed_is_not_called_committed(tmp_path: Path, where: str) -> None:
    folder = write(tmp_path / "run")
    root = folder / "checkpoints"
    if where == "elsewhere":
        root = tmp_path / "scratch"
        run = json.loads((folder / "run.json").read_text())
        run["config"]["checkpoint"] = {"dir": str(root)}
        (folder / "run.json").write_text(json.dumps(run))
    before = [saved for saved in read(folder).saves if saved.state == "committed"]
    (root / "fence").mkdir(parents=True)
    (root / before[-1].name).mkdir()
    after = [saved.state for saved in read(folder).saves if saved.bytes is not None]
    assert after == [*["removed"] * (len(before) - 1), "committed"]
    assert "removed" in render(read(folder), now=0.0)


def test_where_no_checkpoint_root_is_to_be_found_nothing_is_called_removed(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    before = [saved.state for saved in read(folder).saves]
    (folder / "checkpoints").mkdir()
    assert [saved.state for saved in read(folder).saves] == before
    (folder / "run.json").write_text("torn")
    assert [saved.state for saved in read(folder).saves] == before


@pytest.mark.parametrize(
    ("length", "texts"),
    [
        (40.2, ["0", "10 s", "20 s", "30 s", "40 s"]),
        (80.0, ["0", "10 s", "20 s", "30 s", "40 s", "50 s", "60 s", "70 s", "80 s"]),
        (100.0, ["0", "15 s", "30 s", "45 s", "60 s", "75 s", "90 s"]),
        (3600.0 * 11, ["0", "2 h", "4 h", "6 h", "8 h", "10 h"]),
        (86_400.0 * 30, ["0", "5 d", "10 d", "15 d", "20 d", "25 d", "30 d"]),
    ],
)
def test_the_axis_of_time_has_moments_that_a_clock_knows(length: float, texts: list[str]) -> None:
    assert [text for _, text in figures.time_ticks(length)] == texts


def test_each_colour_of_a_phase_is_named_beside_it(page: str) -> None:
    page = page[page.index('id="incidents"') :]
    first = page[page.index("1. rank_crash") : page.index("2. node_lost")]
    drawn = re.findall(r'class="phase (p\d)"', first)
    named = re.findall(r'class="key (p\d)"></span>(\w+)', first)
    assert drawn == [colour for colour, _ in named]
    assert [name for _, name in named][:2] == ["detected", "stopped"]


def test_what_was_found_to_be_good_is_called_verified(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    root = folder / "checkpoints"
    for name in ("step-00000240", "step-00000260"):
        (root / name).mkdir(parents=True)
    (root / "fence").touch()
    (root / "step-00000240" / ".verified.json").write_text("{}")
    assert [saved.state for saved in read(folder).saves][-2:] == ["verified", "committed"]


def many(folder: Path, incidents: int) -> Path:
    """A run of months: a fault every half minute of training, on eight nodes."""
    folder.mkdir()
    names, t, step, detail = [f"node{number:03d}" for number in range(8)], 1.7e9, 0, "killed by SIGKILL; " + "x" * 200
    lines: list[str] = []
    losses: list[str] = []

    def tell(event: str, attempt: int, after_s: float, **fields: object) -> None:
        nonlocal t
        t += after_s
        known = {"v": 1, "seq": len(lines) + 1, "t": t, "restart": 0, "attempt": attempt, "event": event}
        lines.append(json.dumps({**known, **fields}) + "\n")

    tell("run_started", 0, 0, run_id="r", argv=["x"])
    tell("allocation_started", 0, 1, nodes=names, job_id="7")
    for attempt in range(1, incidents + 2):
        tell("attempt_started", attempt, 1, nodes=names, world=64, plan={})
        tell("ranks_launched", attempt, 1, world=64)
        tell("first_step", attempt, 1, step=step + 1)
        step += 30
        losses += [json.dumps({"attempt": attempt, "step": step - back, "loss": 1 / step}) + "\n" for back in (20, 10, 0)]
        tell("checkpoint_committed", attempt, 30, step=step, name=f"step-{step}", bytes=1, seconds=1.0)
        if attempt <= incidents:
            where = {"cause": "rank_crash", "node": names[attempt % 8], "rank": attempt % 64, "detail": detail}
            tell("fault_detected", attempt, 1, since=t, **where)
            tell("attempt_stopped", attempt, 1, fault=True, **where)
    tell("run_completed", incidents + 1, 1, step=step)
    (folder / "events.jsonl").write_text("".join(lines))
    (folder / "metrics.jsonl").write_text("".join(losses))
    return folder


def test_thousands_of_incidents_make_a_page_that_a_browser_opens(tmp_path: Path) -> None:
    story = read(many(tmp_path / "run", 3000))
    page = render(story, now=0.0)
    assert len(page.encode()) < 1_500_000
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)
    outline = Outline()
    outline.feed(page)
    text = " ".join(" ".join(outline.text).split())
    assert "through 3000 incidents" in text
    assert "3000 of 3000" in text, "the table by cause counts all of them"
    assert page.count("<article>") == 200
    assert "The newest 200; 2800 earlier ones are in the table by cause below" in text
    assert "events RUN_DIR --incidents --json" in text
    assert "3000. rank_crash" in text
    assert " 2800. rank_crash" not in text
    # what is drawn covers the whole run, from its first attempt to its last
    timeline = figures.timeline(story)
    assert "attempts 1 to " in timeline
    assert re.search(r"attempts \d+ to 3001|attempt 3001 on", timeline)
    assert re.search(r"incidents, from 1 to \d+<", timeline)
    assert "mostly " in timeline


def test_a_run_that_fits_is_drawn_one_by_one(tmp_path: Path) -> None:
    story = read(many(tmp_path / "run", 40))
    timeline, page = figures.timeline(story), render(story, now=0.0)
    assert timeline.count("on 64 ranks") == 41 * 8
    assert "mostly" not in timeline
    assert page.count("<article>") == 40
    assert "in the table by cause" not in page


def test_points_of_many_attempts_are_bounded(tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for attempt in range(90):
            file.writelines(f'{{"attempt": {attempt}, "step": {attempt * 1500 + step}, "loss": 1}}\n' for step in range(1500))
    found = curves(tmp_path / "metrics.jsonl")
    assert 50_000 < sum(len(one.steps) for one in found) < 102_000
    assert (len(found), found[0].steps[0], found[89].steps[-1]) == (90, 0, 90 * 1500 - 1)


def test_neighbours_are_put_together_only_where_there_are_too_many() -> None:
    assert thinning.narrowest(2000, 2000, 800.0) == 0.0
    assert thinning.narrowest(2001, 2000, 800.0, lanes=5) == 2.0
    bars = [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5), (1.5, 9.0), (9.1, 9.2), (20.0, 20.1), (20.1, 20.2)]
    ends = (lambda bar: bar[0], lambda bar: bar[1])
    assert [len(group) for group in thinning.grouped(bars, *ends, 0.0)] == [1] * 7
    assert [len(group) for group in thinning.grouped(bars, *ends, 1.5)] == [3, 1, 1, 2], "a wide gap parts them"
