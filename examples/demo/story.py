"""The story of the demo, the same with and without Slurm: train, lose a node, go on, be preempted, come back."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from curves import largest_difference, read_curve, side_by_side
from record import DemoFailed, Record, wait_for

NODES, FEWEST = 4, 3
LIMIT_S = 30.0  # from power-off to the first resumed step, with Slurm's own SlurmdTimeout at 300 s
CLOSE_ENOUGH = 1e-4


class Stage(Protocol):
    """Where the story plays; ``lost`` and ``preempted`` are its words for what happens."""

    lost: str
    preempted: str

    def describe(self) -> str: ...
    def reference(self, run_dir: Path, steps: int) -> None: ...
    def submit(self, folder: Path, steps: int) -> tuple[str, Path]: ...
    def expendable_node(self) -> str: ...
    def power_off(self, node: str) -> float: ...
    def power_on(self, node: str) -> None: ...
    def preempt(self) -> float: ...
    def restarts(self) -> int: ...
    def outcome(self) -> str | None: ...
    def evidence(self) -> str: ...


@dataclass
class Result:
    """What was seen, in seconds and counts; every number of the last line comes from here."""

    node: str = ""
    lost_s: float = 0.0
    preempted_s: float = 0.0
    restarts: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    difference: float = 0.0
    final_difference: float = 0.0
    steps: int = 0


class Story:
    """Plays once; every wait has a limit, and what does not come is DemoFailed with the reason."""

    def __init__(self, stage: Stage, folder: Path, steps: int) -> None:
        self.stage = stage
        self.steps = steps
        self.folder = folder
        self.reference_dir = folder / "undisturbed"
        self.record = Record(folder)  # of the run, once it is submitted
        self.began = time.monotonic()
        self.marks: dict[int, str] = {}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def wait_for_step(self, step: int, within_s: float) -> None:
        self.wait(f"step {step}", lambda: self.record.step() >= step, within_s)

    def wait(self, what: str, look: object, within_s: float) -> object:
        def look_or_fail() -> object:
            failed = self.record.failed()
            if failed:
                raise DemoFailed(f"the run failed while waiting for {what}: {failed}")
            return look()  # type: ignore[operator]

        return wait_for(what, look_or_fail, within_s)

    def play(self) -> Result:
        result = Result()
        self.say(self.stage.describe())
        self.say(f"the undisturbed run first: {self.steps} steps, one process, same seed, same global batch")
        self.stage.reference(self.reference_dir, self.steps)
        self.say(f"submitting the same training as an ordinary user, elastic: {FEWEST} to {NODES} nodes")
        name, run_dir = self.stage.submit(self.folder, self.steps)
        self.record = Record(run_dir)
        self.wait(f"the first step on {NODES} nodes", lambda: self.record.first_steps(NODES), 120)
        self.say(f"{name} trains on {NODES} nodes, step {self.record.step()}")
        result.restarts.append(self.stage.restarts())

        self.lose_a_node(result)
        self.be_preempted(result)

        self.wait("the end of training", lambda: self.record.of("run_completed"), 180)
        outcome = self.wait("the end of the job", self.stage.outcome, 60)
        self.say(f"complete at step {self.record.of('run_completed')[-1]['step']}; {name} is {outcome}")
        self.compare(result)
        return result

    def lose_a_node(self, result: Result) -> None:
        self.wait_for_step(self.steps // 4, 120)
        result.node = node = self.stage.expendable_node()
        at = self.record.step()
        off = self.stage.power_off(node)
        self.say(f"{node} {self.stage.lost} at step {at}")
        first = self.first_step_after(off, FEWEST, 60)
        result.lost_s = first["t"] - off
        result.restarts.append(self.stage.restarts())
        self.marks[first["step"]] = f"first step on {FEWEST} nodes"
        self.say(f"goes on with {FEWEST} nodes at step {first['step']}, {result.lost_s:.1f} s after power-off; "
                 f"restart count {result.restarts[0]} -> {result.restarts[1]}")  # fmt: skip
        self.stage.power_on(node)
        self.say(f"{node} is on again and back in service")

    def be_preempted(self, result: Result) -> None:
        self.wait_for_step(self.steps // 2, 120)
        at = self.record.step()
        told = self.stage.preempt()
        self.say(f"{self.stage.preempted} at step {at}")
        first = self.first_step_after(told, NODES, 180)
        result.preempted_s = first["t"] - told
        result.restarts.append(self.stage.restarts())
        self.marks[first["step"]] = f"first step on {NODES} nodes again"
        self.say(f"back on {NODES} nodes at step {first['step']}, {result.preempted_s:.1f} s after the warning; "
                 f"restart count {result.restarts[1]} -> {result.restarts[2]}")  # fmt: skip

    def first_step_after(self, t: float, nodes: int, within_s: float) -> dict[str, float]:
        def look() -> dict[str, float] | None:
            return next((event for event in self.record.first_steps(nodes) if event["t"] > t), None)

        return self.wait(f"a first step on {nodes} nodes", look, within_s)  # type: ignore[return-value]

    def compare(self, result: Result) -> None:
        ours, theirs = read_curve(self.record.run_dir), read_curve(self.reference_dir)
        result.steps = max(ours, default=0)
        result.difference, where = largest_difference(ours, theirs)
        if result.difference == float("inf"):
            raise DemoFailed(
                f"the curves do not have the same steps: {len(ours)} and {len(theirs)}, step {where} is in one only"
            )
        last = max(ours)
        result.final_difference = abs(ours[last] - theirs[last]) / abs(theirs[last])
        result.batches = [event["plan"]["global_batch"] for event in self.record.of("attempt_started")]
        print("\nIncidents\n")
        sys.stdout.flush()
        subprocess.run(
            [sys.executable, "-m", "slurm_resilience", "events", str(self.record.run_dir), "--incidents"], check=True
        )
        print("\nLoss\n")
        print("\n".join(side_by_side(ours, theirs, self.marks)))
        print(f"\n  largest relative difference over {len(ours)} steps: {result.difference:.1e} (step {where})\n", flush=True)


def verdict(result: Result, steps: int) -> list[str]:
    """What is not as promised; empty when the demo is OK."""
    before, lost, preempted = result.restarts
    wrong = []
    if lost != before:
        wrong.append(f"losing a node cost a requeue: restart count {before} -> {lost}")
    if preempted != lost + 1:
        wrong.append(f"the preemption should have cost one requeue: restart count {lost} -> {preempted}")
    if result.lost_s > LIMIT_S:
        wrong.append(f"{result.lost_s:.1f} s from power-off to the first resumed step, more than {LIMIT_S:g} s")
    if len(set(result.batches)) != 1:
        wrong.append(f"the global batch changed: {result.batches}")
    if result.steps != steps:
        wrong.append(f"{result.steps} of {steps} steps were taken")
    if not result.final_difference <= CLOSE_ENOUGH:
        wrong.append(f"the final loss differs by {result.final_difference:.1e}, more than {CLOSE_ENOUGH:g}")
    return wrong


def last_line(result: Result) -> str:
    before, lost, preempted = result.restarts
    return (
        f"DEMO OK  {result.node} lost -> first step on {FEWEST} nodes {result.lost_s:.1f} s (restart count {before} -> {lost})"
        f" | preempted -> first step on {NODES} nodes {result.preempted_s:.1f} s (restart count {lost} -> {preempted})"
        f" | {result.steps} steps, global batch {'/'.join(map(str, result.batches))}"
        f" | final loss differs by {result.final_difference:.1e}"
    )
