"""A run as it could have been, written into a folder: four nodes, a crash, a lost node, a preemption, a bad checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from slurm_resilience.observe.events import EventWriter

NODES = ["n1", "n2", "n3", "n4"]


class ARun:
    """Writes events and metrics; time is what it says it is."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.t, self.step, self.saved = folder, 1_800_000_000.0, 0, 0
        self.writer = EventWriter(folder, restart=0)
        self.metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8")
        config = {"budgets": {"node_lost": 10, "rank_crash": 3}}
        argv = ["python", "train.py", "--lr", "<3e-4>"]
        (folder / "run.json").write_text(json.dumps({"v": 1, "run_id": "gpt-1a2b3c", "argv": argv, "config": config}))
        self.say("run_started", run_id="gpt-1a2b3c", argv=argv)

    def say(self, event: str, after: float = 0.0, **fields: Any) -> None:
        self.t += after
        self.writer.write(event, t=self.t, **fields)

    def allocate(self, nodes: list[str], after: float) -> None:
        self.say("allocation_started", after, nodes=nodes, job_id="4711")
        for node in nodes:
            self.say("agent_joined", 0.3, node=node, warm=True)

    def launch(self, nodes: list[str], load_s: float = 0.4) -> None:
        self.writer.attempt += 1
        self.say(
            "attempt_started", 0.2, nodes=nodes, world=len(nodes), plan={"global_batch": 48, "mesh": {"dp_shard": len(nodes)}}
        )
        self.say("ranks_launched", 0.2, world=len(nodes))
        if self.saved:
            self.step = self.saved
            self.say(
                "resumed", load_s, step=self.step, checkpoint=f"step-{self.step:08d}", verify_s=load_s / 4, world=len(nodes)
            )
        else:
            self.say("started_fresh", load_s)
        self.nodes, self.first = nodes, True

    def train(self, to: int, every: int = 20) -> None:
        while self.step < to:
            self.step += 1
            self.t += 0.4 / len(self.nodes)
            loss = 2.2 + 3.4 * math.exp(-self.step / 60) + 0.08 * math.sin(self.step * 1.7)
            line = {"step": self.step, "attempt": self.writer.attempt, "world": len(self.nodes), "t": self.t, "loss": loss}
            self.metrics.write(json.dumps(line) + "\n")
            if self.first:
                self.say("first_step", step=self.step, loss=loss)
                self.first = False
            else:
                self.say("step_reported", step=self.step, loss=loss, node="n1", rank=0)
            if self.step % every == 0:
                self.say("checkpoint_started", step=self.step)
                self.saved = self.step
                name = f"step-{self.step:08d}"
                self.say("checkpoint_committed", 0.5, step=self.step, name=name, seconds=0.5, bytes=31_000_000)

    def fault(self, cause: str, node: str, seen_s: float, detail: str, **more: Any) -> None:
        began = self.t
        self.say("fault_detected", seen_s, cause=cause, node=node, detail=detail, since=began, **more)
        if cause == "node_lost":
            self.say("agent_lost", node=node, why=detail)
        self.say("attempt_stopped", 0.3, cause=cause, node=node, fault=True, detail=detail, step=self.step, **more)

    def close(self) -> None:
        self.writer.close()
        self.metrics.close()


def write(folder: Path) -> Path:
    """The whole run; returns the folder."""
    run = ARun(folder)
    run.allocate(NODES, 2.0)
    run.launch(NODES)
    run.train(70)
    run.fault("rank_crash", "n2", 0.1, "killed by SIGKILL", rank=1)
    run.launch(NODES)
    run.train(130)
    run.fault("node_lost", "n3", 4.1, "silent for 4.1 s")
    run.launch(["n1", "n2", "n4"])
    run.train(190)
    run.say("warning_received", signal="SIGTERM", source="agent on n1")
    run.say("warning_explained", 0.3, cause="preemption", detail="by job 99", requeued=True, deadline=run.t + 30)
    run.say("checkpoint_started", step=run.step)
    run.saved = run.step
    run.say("checkpoint_committed", 0.5, step=run.step, name=f"step-{run.step:08d}", seconds=0.5, bytes=31_000_000)
    run.say("stopped", 0.2, step=run.step, why="preemption", saved=True)
    run.say("attempt_stopped", 0.1, cause="preemption", step=run.step, saved=True)
    run.say("requeue_started", 0.1, nodes=[3, 4])
    run.say("requeue_done", 2.0)
    run.writer.restart += 1
    run.allocate(NODES, 16.0)
    run.say(
        "checkpoint_quarantined", 0.5, step=190, name="step-00000190", reason="probe loss: expected 2.34, measured 9.1 <script>"
    )
    run.saved = 180
    run.launch(NODES, load_s=0.9)
    run.train(260)
    run.say("finished", 0.1, step=260)
    run.say("run_completed", 0.1, step=260)
    run.close()
    return folder
