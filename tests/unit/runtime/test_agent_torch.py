"""Unmodified torch programs under agents: a process group by ``env://``, a rank killed, and the next attempt within seconds."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from slurm_resilience.runtime import messages as m
from tests.unit.runtime.agent_stage import Stage

ALL_REDUCE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", int(total), dist.get_world_size(), torch.get_num_threads(), flush=True)
while True:
    dist.all_reduce(total)
    time.sleep(0.02)
"""


def start(stage: Stage, attempt: int, peers: list, ranks: int) -> float:
    """Store on the first node, launch on all; seconds until every rank has been through an all-reduce."""
    began = time.monotonic()
    peers[0].send(m.Store(attempt))
    ready = stage.until(lambda: peers[0].of(m.StoreReady, attempt=attempt))[0]
    world = ranks * len(peers)
    for number, peer in enumerate(peers):
        stage.launch(
            peer,
            attempt,
            ranks,
            first=number * ranks,
            world=world,
            group_rank=number,
            groups=len(peers),
            master_port=ready.port,
        )
    done = f"sum {world * (world + 1) // 2} {world} 1\n"
    stage.until(lambda: all(stage.log(attempt, rank) == done for rank in range(world)))
    stage.until(lambda: all(peer.of(m.Launched, attempt=attempt) for peer in peers))
    return time.monotonic() - began


def test_a_group_is_back_without_a_cold_start_after_a_rank_was_killed(tmp_path: Path) -> None:
    with Stage(tmp_path, preload=["torch"]) as stage:
        stage.script(ALL_REDUCE)
        peer = stage.join()
        stage.until(lambda: peer.of(m.Warm)[-1].warm)
        warm = peer.of(m.Warm)[-1]
        start(stage, 1, [peer], 2)
        assert peer.of(m.Launched, attempt=1)[0].warm
        first, _ = stage.started(peer, 1)
        killed = time.monotonic()
        os.kill(first.pid, signal.SIGKILL)
        stage.until(lambda: peer.of(m.Exit, attempt=1, rank=0, signal="SIGKILL"))
        detected = time.monotonic() - killed
        peer.send(m.Kill(1))
        stage.until(lambda: peer.of(m.Stopped, attempt=1))
        stopped = time.monotonic() - killed
        assert len(stage.alive()) == 2, "the agent and its launcher; no rank, no store"
        start(stage, 2, [peer], 2)
        back = time.monotonic() - killed
        print(f"PHASES preload {warm.seconds:.2f} detected {detected:.3f} stopped {stopped:.3f} "
              f"forked +{peer.of(m.Launched, attempt=2)[0].seconds:.3f} all-reduce {back:.3f}")  # fmt: skip
        assert peer.of(m.Launched, attempt=2)[0].warm  # about half a second on an idle machine


def test_two_nodes_meet_at_the_store_of_the_first(tmp_path: Path) -> None:
    with Stage(tmp_path, preload=["torch"]) as stage:
        stage.script(ALL_REDUCE)
        peers = [stage.join("node1"), stage.join("node2")]
        for peer in peers:
            stage.until(lambda peer=peer: peer.of(m.Beat))
        start(stage, 1, peers, 1)
        (store,) = peers[0].of(m.StoreReady)
        assert store.port > 0
        assert not peers[1].of(m.StoreReady)


def test_a_cold_start_meets_at_a_cold_store(tmp_path: Path) -> None:
    with Stage(tmp_path, warm=False) as stage:
        stage.script(ALL_REDUCE)
        peer = stage.join()
        start(stage, 1, [peer], 1)
        assert not peer.of(m.Launched)[0].warm
        peer.send(m.Kill(1))
        stage.until(lambda: peer.of(m.Stopped))
        assert len(stage.alive()) == 1, "the agent"


def test_the_death_of_the_store_is_told(tmp_path: Path) -> None:
    with Stage(tmp_path, preload=["torch"]) as stage:
        peer = stage.join()
        peer.send(m.Store(1))
        stage.until(lambda: peer.of(m.StoreReady))
        from slurm_resilience.runtime.processes import descendants

        (launcher,) = [p for p in descendants(stage.agents[0].pid) if p.parent == peer.hello.pid]
        (store,) = [p for p in descendants(stage.agents[0].pid) if p.parent == launcher.pid]
        os.kill(store.pid, signal.SIGKILL)
        assert stage.until(lambda: peer.of(m.StoreFailed))[0].why == "the store's host died"
