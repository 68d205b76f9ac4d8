"""``plan mesh``: the same experiment on these nodes and on every smaller allocation."""

from __future__ import annotations

import argparse
from typing import Any

from slurm_resilience.cli.plan_options import few_to_many, positive, table
from slurm_resilience.errors import ConfigError, ExitCode, SlurmError
from slurm_resilience.observe.json_text import dumps

# A table of more allocations than this is read by nobody; --json has them all.
_SHOWN = 1000
# Up to this many nodes every smaller allocation lists the samples of each rank; beyond, it counts them ("samples").
_LISTED_NODES = 128


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=few_to_many, required=True, metavar="N", help="nodes of the whole allocation, or fewest and most: 2-4"
    )
    parser.add_argument(
        "--gpus-per-node", default="1", metavar="N", help='GPUs of each node: 8, a100:8, or as Slurm writes it "8(x5),7"'
    )
    parser.add_argument("--gpus-per-task", type=positive, default=1, metavar="N", help="GPUs of each rank (default 1)")
    parser.add_argument("--global-batch", type=positive, metavar="N", help="samples of one optimizer step, kept on any world")
    parser.add_argument(
        "--micro-batch", type=positive, metavar="N", help="samples of one forward pass (default: a rank's whole share)"
    )
    parser.add_argument("--min-nodes", type=positive, metavar="N", help="smallest allocation to plan (default 1)")
    for name in ("pp", "dp-replicate", "dp-shard", "cp", "tp", "ep"):
        parser.add_argument(
            f"--{name}",
            metavar="C",
            help=f'degree of {name}: 4, or a limit such as "<=8", ">=2", "/32", "any"; "in", "out" of a node',
        )
    parser.add_argument(
        "--deal", choices=["even", "whole"], default="even", help="spread leftover samples evenly, or deal whole micro-batches"
    )
    parser.add_argument(
        "--keep-accumulation",
        choices=["linear", "sqrt", "none"],
        metavar="RULE",
        help="let the batch follow the world instead, and scale the learning rate: linear, sqrt or none",
    )


def execute(args: argparse.Namespace) -> int:
    from slurm_resilience.elastic import MeshConstraints
    from slurm_resilience.elastic.outlook import outlook

    fewest, nodes = args.nodes
    if fewest is not None and args.min_nodes is not None and args.min_nodes != fewest:
        raise ConfigError(
            f"--nodes {fewest}-{nodes} contradicts --min-nodes {args.min_nodes}", remedy="say the smallest allocation once"
        )
    min_nodes = fewest or args.min_nodes or 1
    _refuse_idle_options(args)
    least = min_nodes if args.json else max(min_nodes, nodes - _SHOWN + 1)
    prospects = outlook(
        _slots(nodes, args.gpus_per_node, args.gpus_per_task),
        MeshConstraints.of(**{name: getattr(args, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}),
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        min_nodes=least,
        deal=args.deal,
        scale=args.keep_accumulation,
    )
    if args.json:
        whole, *smaller = prospects
        listed = nodes <= _LISTED_NODES
        document = whole.to_json(list_samples=True)
        document["smaller"] = [prospect.to_json(list_samples=listed) for prospect in smaller]
        print(dumps(document))
        return ExitCode.OK
    rows: list[tuple[str, ...]] = [
        ("nodes", "ranks", "mesh", "accumulation", "samples of a data-parallel rank (share)", "spares")
    ]
    rows += [_mesh_row(prospect) for prospect in prospects]
    table(rows)
    if prospects[-1].nodes == least > min_nodes:
        print(f"{least - min_nodes:,} smaller allocations are not shown: --nodes {least - 1} goes on, --json has all of them.")
    elif prospects[-1].nodes > min_nodes:
        print(f"No mesh fits on fewer than {prospects[-1].nodes} nodes.")
    return ExitCode.OK


def _refuse_idle_options(args: argparse.Namespace) -> None:
    """Raise :class:`ConfigError` for options that would do nothing without a word."""
    if args.global_batch is None:
        for option, asked in (
            ("--micro-batch", args.micro_batch is not None),
            ("--deal", args.deal != "even"),
            ("--keep-accumulation", args.keep_accumulation is not None),
        ):
            if asked:
                raise ConfigError(f"{option} without --global-batch would do nothing", remedy="give --global-batch as well")
    elif args.micro_batch is not None and args.micro_batch > args.global_batch:
        raise ConfigError(
            f"--micro-batch {args.micro_batch} is more than the whole --global-batch {args.global_batch}",
            remedy="give a micro-batch of at most the global batch",
        )


def _slots(nodes: int, text: str, per_task: int) -> list[int]:
    """Ranks that each node can hold."""
    from slurm_resilience.elastic.axes import MOST_GPUS

    counts = _gpus(text)
    if nodes > MOST_GPUS:
        raise ConfigError(f"--nodes {nodes} is more than any cluster has")
    if len(counts) == 1:
        counts *= nodes
    if len(counts) != nodes:
        raise ConfigError(
            f"--gpus-per-node {text[:80]} describes {len(counts)} nodes, --nodes says {nodes}",
            remedy="give one number for all nodes, or one for each",
        )
    slots = [count // per_task for count in counts]
    if per_task > 1 and not any(slots):
        raise ConfigError(
            f"A task needs {per_task} GPUs, and no node has as many",
            evidence=f"--gpus-per-node {text[:80]}",
            remedy="give fewer GPUs per task, or nodes with more",
        )
    return slots


def _gpus(text: str) -> tuple[int, ...]:
    from slurm_resilience.slurm.environment import tasks_per_node
    from slurm_resilience.slurm.gpus import gpus_in

    try:
        return tasks_per_node(text)
    except SlurmError as error:
        typed = gpus_in(text, bare=True) if ":" in text else None
        if typed is not None:
            return (typed,)
        raise ConfigError(
            f"--gpus-per-node {text[:80]!r} cannot be read",
            evidence=error.what,
            remedy='write 8 or a100:8, or "8(x5),7" for nodes that differ',
        ) from None


def _mesh_row(prospect: Any) -> tuple[str, ...]:
    mesh = " x ".join(f"{name} {degree}" for name, degree in prospect.mesh.items() if degree > 1) or "one rank"
    if prospect.batch is None:
        return (str(prospect.nodes), str(prospect.ranks), mesh, "", "", str(prospect.spares))
    total = prospect.batch.global_batch
    samples = ", ".join(f"{each} (x{count}, {each}/{total})" for count, each in prospect.batch.runs)
    if prospect.lr_factor != 1.0:
        samples += f"; learning rate x {prospect.lr_factor:.4g}"
    return (str(prospect.nodes), str(prospect.ranks), mesh, str(prospect.batch.accumulation), samples, str(prospect.spares))
