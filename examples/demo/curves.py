"""Two loss curves side by side, and how far apart they ever are."""

from __future__ import annotations

import json
from pathlib import Path

BARS = "▁▂▃▄▅▆▇█"


def read_curve(run_dir: Path) -> dict[int, float]:
    """step -> loss, from RUN_DIR/metrics.jsonl; where a step was taken again, the newest attempt counts."""
    newest: dict[int, tuple[int, float]] = {}
    path = run_dir / "metrics.jsonl"
    for raw in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = json.loads(raw)
        except ValueError:  # a line that is being written
            continue
        if "loss" in line and line["attempt"] >= newest.get(line["step"], (0, 0.0))[0]:
            newest[line["step"]] = (line["attempt"], float(line["loss"]))
    return {step: loss for step, (_, loss) in sorted(newest.items())}


def largest_difference(ours: dict[int, float], theirs: dict[int, float]) -> tuple[float, int]:
    """The largest relative difference and the step where it is; infinite when a step is missing on one side."""
    if ours.keys() != theirs.keys() or not ours:
        missing = ours.keys() ^ theirs.keys()
        return float("inf"), min(missing, default=0)
    return max((abs(ours[step] - theirs[step]) / abs(theirs[step]), step) for step in ours)


def sparkline(curve: dict[int, float], low: float, high: float, width: int = 60) -> str:
    """The curve as one line of bars, the mean of each piece."""
    values = list(curve.values())
    out = []
    for column in range(min(width, len(values))):
        piece = values[
            column * len(values) // width : max((column + 1) * len(values) // width, column * len(values) // width + 1)
        ]
        mean = sum(piece) / len(piece)
        out.append(BARS[min(len(BARS) - 1, int((mean - low) / (high - low or 1.0) * len(BARS)))])
    return "".join(out)


def side_by_side(ours: dict[int, float], theirs: dict[int, float], marks: dict[int, str], rows: int = 9) -> list[str]:
    """A compact table: some steps, both losses, their difference, and what happened there."""
    both = [*ours.values(), *theirs.values()]
    low, high = min(both), max(both)
    lines = [f"  disturbed    {sparkline(ours, low, high)}", f"  undisturbed  {sparkline(theirs, low, high)}", ""]
    lines.append(f"  {'step':>6}  {'disturbed':>12}  {'undisturbed':>12}  {'difference':>10}")
    steps = sorted(ours.keys() & theirs.keys())
    chosen = {steps[round(i * (len(steps) - 1) / (rows - 1))] for i in range(rows)} | (marks.keys() & set(steps))
    for step in sorted(chosen):
        apart = abs(ours[step] - theirs[step]) / abs(theirs[step])
        lines.append(f"  {step:>6}  {ours[step]:>12.7f}  {theirs[step]:>12.7f}  {apart:>10.1e}  {marks.get(step, '')}".rstrip())
    return lines
