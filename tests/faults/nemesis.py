"""Kills, at seeded moments, exactly the process that it says, and proves that the kill happened.

A fault that fires at a random time after a constant sleep tests nothing in particular; this one waits for a step of the run,
then a seeded part of a step more, so that it falls anywhere in a step: into compute, a collective, a save.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.sandbox.processes import Process
from tests.faults import cast
from tests.faults.history import Fired, read_lines


@dataclass(frozen=True)
class Fault:
    """What to kill, where (``on_batch_host``; no matter for a supervisor), and when: ``delay_s`` after ``step`` was taken."""

    kind: str
    on_batch_host: bool
    step: int
    delay_s: float
    choice: int


def draw(seed: int, faults: list[tuple[str, bool]], *, first_step: int, spacing: int, jitter_s: float = 0.25) -> list[Fault]:
    """A schedule: the faults in a seeded order, about ``spacing`` steps apart, each at a seeded moment."""
    rng = random.Random(seed)
    order = list(faults)
    rng.shuffle(order)
    out = []
    for number, (kind, here) in enumerate(order):
        step = first_step + number * spacing + rng.randrange(max(1, spacing // 3))
        out.append(Fault(kind, here, step, delay_s=rng.uniform(0, jitter_s), choice=rng.randrange(1000)))
    return out


def wait_for(what: str, probe: Callable[[], bool], within_s: float, *, say: Callable[[], str] = str) -> None:
    """Wait until ``probe`` holds; AssertionError with the evidence of ``say`` when it does not in time."""
    deadline = time.monotonic() + within_s
    while not probe():
        assert time.monotonic() < deadline, f"{what} did not happen within {within_s:g} s. {say()}"
        time.sleep(0.02)


def newest_step(run_dir: Path) -> int:
    """The step that rank 0 of the newest attempt has completed, 0 before the first."""
    last = 0
    for line in read_lines(run_dir / "metrics.jsonl"):
        last = line["step"]
    return last


class Nemesis:
    """Does the faults of one run, and remembers which of them really happened."""

    def __init__(self, run_dir: Path, batch_host: str) -> None:
        self.run_dir = run_dir
        self.batch_host = batch_host
        self.fired: list[Fired] = []

    def fire(self, fault: Fault, *, within_s: float, say: Callable[[], str] = str) -> Fired:
        """Wait for the moment of ``fault``, kill, and return the proof."""
        self.wait_for_moment(fault, within_s, say)
        hit: list[tuple[str, Process, float]] = []

        def kill() -> bool:
            node, target = self.aim(fault)  # may be dead by now: then there is another one in a moment
            at = time.time()
            if target.alive() and target.send(signal.SIGKILL):
                hit.append((node, target, at))
            return bool(hit)

        wait_for(f"a {fault.kind} that can be killed", kill, 120, say=say)
        ((node, target, at),) = hit
        wait_for(f"the death of {fault.kind} {target.pid}", lambda: not target.alive(), 60)
        return self.remember(fault, node, target.pid, at)

    def wait_for_moment(self, fault: Fault, within_s: float, say: Callable[[], str]) -> None:
        wait_for(f"step {fault.step}", lambda: newest_step(self.run_dir) >= fault.step, within_s, say=say)
        due = time.monotonic() + fault.delay_s
        while time.monotonic() < due:
            time.sleep(0.002)

    def remember(self, fault: Fault, node: str, pid: int, at: float) -> Fired:
        moment = f"{fault.delay_s * 1000:.0f} ms after step {fault.step}"
        done = Fired(fault.kind, node, pid, at, newest_step(self.run_dir), moment, node == self.batch_host)
        self.fired.append(done)
        return done

    def aim(self, fault: Fault) -> tuple[str, Process]:
        """The process that the fault means now, and its node."""
        candidates: list[tuple[str, Process]] = []

        def find() -> bool:
            seen = cast.look(self.run_dir)
            if fault.kind == "supervisor":
                candidates[:] = [(self.batch_host, process) for process in seen.supervisors]
            else:
                found = {
                    "rank": [(each.node, each.process) for each in seen.ranks],
                    "launcher": list(seen.launchers.items()),
                    "agent": list(seen.agents.items()),
                }
                candidates[:] = [each for each in found[fault.kind] if (each[0] == self.batch_host) == fault.on_batch_host]
            return bool(candidates)

        # a relaunch may be under way: then the target is there in a moment
        wait_for(f"a living {fault.kind}, on the batch host: {fault.on_batch_host}", find, 120)
        return candidates[fault.choice % len(candidates)]
