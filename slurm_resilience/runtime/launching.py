"""What each node is told at a launch, and what the policy is told before it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import Cause
from slurm_resilience.progress.packed import pack
from slurm_resilience.runtime.attempt import Attempt
from slurm_resilience.runtime.drain_watch import DrainWatch
from slurm_resilience.runtime.fleet import Fleet
from slurm_resilience.runtime.messages import Launch
from slurm_resilience.runtime.policy import Situation
from slurm_resilience.runtime.spec import RunSpec

_MOST_LOSSES_TO_GROW = 3


def situation(
    fleet: Fleet, drains: DrainWatch, config: ResilienceConfig, spec: RunSpec, *,
    now: float, idle_since: float, fault: tuple[Cause, str] | None, before: Attempt | None, suspects: Mapping[str, str],
) -> Situation:  # fmt: skip
    """How things stand while nothing runs; nodes of the attempt ``before`` come first, drained ones are left aside."""
    known = set(before.nodes) if before is not None else set()
    cause, detail = fault or (None, "")
    can_requeue = config.requeue and spec.can_requeue
    ready = sorted(fleet.ready(now, need_warm=config.warm), key=lambda name: name not in known)
    return Situation(
        fault=cause,
        detail=detail,
        ready=drains.without_drained(ready, fewest=config.nodes[0], can_requeue=can_requeue),
        coming=tuple(name for name in fleet.coming(now, need_warm=config.warm) if not drains.avoids(name)),
        returning=fleet.returning(),
        lost=fleet.lost(),
        idle_s=now - idle_since,
        can_requeue=can_requeue,
        suspects=suspects,
        before=before.nodes if before is not None else (),
    )


def launches(
    attempt: Attempt, fleet: Fleet, spec: RunSpec, *, excused: list[int], wait_warm: bool, ended: str
) -> Iterator[tuple[int | None, Launch]]:
    """The connection and the order of each node.  ``ended``: how the attempt before did, for the head of the logs.

    There are as many as nodes: none may grow with their number, nor take a time that does.
    """
    placement, port = attempt.placement, attempt.master_port or 0
    plan = pack(placement.plan | {"excused_attempts": excused})
    world, groups, argv = placement.world, len(placement.nodes), list(spec.argv)
    first = fleet.nodes[placement.nodes[0]]
    for group, (name, ranks) in enumerate(zip(placement.nodes, placement.ranks, strict=True)):
        launch = Launch(
            attempt=attempt.number, world=world, ranks=[[rank, local] for local, rank in enumerate(ranks)],
            group_rank=group, groups=groups, master_addr=first.address, master_port=port,
            store_hosted=port > 0, argv=argv, cwd=spec.cwd, env=spec.env, checkpoints=spec.checkpoints,
            settings=spec.settings, plan=plan, wait_warm=wait_warm,
            header=f"=== attempt {attempt.number} on {name}{ended} ===",
        )  # fmt: skip
        yield fleet.nodes[name].conn, launch


def reinforcements(
    attempt: Attempt, fleet: Fleet, drains: DrainWatch, config: ResilienceConfig, now: float, suspects: Collection[str]
) -> list[str]:
    """Nodes that a larger attempt could have besides those of this one."""
    mine = set(attempt.nodes)
    if len(mine) >= config.nodes[1]:
        return []
    return [
        name
        for name in fleet.ready(now, need_warm=config.warm)
        if name not in mine
        and name not in suspects
        and not drains.avoids(name)
        and fleet.nodes[name].losses <= _MOST_LOSSES_TO_GROW
    ]
