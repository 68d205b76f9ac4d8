"""Plan before you submit: meshes on fewer nodes, checkpoint intervals, effective training time, replayed failures.

Nothing here asks Slurm or changes anything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from slurm_resilience.errors import ExitCode, nearest


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="mesh", required=True, parser_class=_VerbParser)
    for name, (summary, add, run) in _VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add(verb)
        verb.add_argument("--json", action="store_true", help="print one JSON document")
        verb.set_defaults(run=run)


def execute(args: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


class _VerbParser(argparse.ArgumentParser):
    """A verb's own parser, whose errors name the nearest of its own options."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"unknown option {rest[0]!r}: {nearest(rest[0].split('=')[0], options)}")
        return parsed, rest

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}\nSee '{self.prog} --help'.\n")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


# --- plan mesh --------------------------------------------------------------------------------------------------------

# Up to this many nodes every smaller allocation lists the samples of each rank; beyond, it counts them ("samples").
_LISTED_NODES = 128


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=_positive, required=True, help="nodes of the whole allocation")
    parser.add_argument(
        "--gpus-per-node", default="1", metavar="N", help='GPUs of each node: 8, or as Slurm writes it "8(x5),7"'
    )
    parser.add_argument("--gpus-per-task", type=_positive, default=1, metavar="N", help="GPUs of each rank (default 1)")
    parser.add_argument("--global-batch", type=_positive, metavar="N", help="samples of one optimizer step, kept on any world")
    parser.add_argument(
        "--micro-batch", type=_positive, metavar="N", help="samples of one forward pass (default: a rank's whole share)"
    )
    parser.add_argument("--min-nodes", type=_positive, default=1, metavar="N", help="smallest allocation to plan (default 1)")
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


def _mesh(args: argparse.Namespace) -> int:
    from slurm_resilience.elastic import MeshConstraints
    from slurm_resilience.elastic.outlook import outlook

    prospects = outlook(
        _node_gpus(args.nodes, args.gpus_per_node, args.gpus_per_task),
        MeshConstraints.of(**{name: getattr(args, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}),
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        min_nodes=args.min_nodes,
        deal=args.deal,
        scale=args.keep_accumulation,
    )
    if args.json:
        whole, *smaller = prospects
        listed = args.nodes <= _LISTED_NODES
        document = whole.to_json(list_samples=True)
        document["smaller"] = [prospect.to_json(list_samples=listed) for prospect in smaller]
        print(json.dumps(document))
        return ExitCode.OK
    rows: list[tuple[str, ...]] = [
        ("nodes", "ranks", "mesh", "accumulation", "samples of a data-parallel rank (share)", "spares")
    ]
    rows += [_mesh_row(prospect) for prospect in prospects]
    _table(rows)
    if prospects[-1].nodes > args.min_nodes:
        print(f"No mesh fits on fewer than {prospects[-1].nodes} nodes.")
    return ExitCode.OK


def _node_gpus(nodes: int, text: str, per_task: int) -> list[int]:
    from slurm_resilience.errors import ConfigError
    from slurm_resilience.slurm.environment import tasks_per_node

    counts = tasks_per_node(text)
    if len(counts) == 1:
        counts *= nodes
    if len(counts) != nodes:
        raise ConfigError(
            f"--gpus-per-node {text} describes {len(counts)} nodes, --nodes says {nodes}",
            remedy="give one number for all nodes, or one for each",
        )
    return [count // per_task for count in counts]


def _mesh_row(prospect: Any) -> tuple[str, ...]:
    mesh = " x ".join(f"{name} {degree}" for name, degree in prospect.mesh.items() if degree > 1) or "one rank"
    if prospect.batch is None:
        return (str(prospect.nodes), str(prospect.ranks), mesh, "", "", str(prospect.spares))
    total = prospect.batch.global_batch
    samples = ", ".join(f"{each} (x{count}, {each}/{total})" for count, each in prospect.batch.runs)
    if prospect.lr_factor != 1.0:
        samples += f"; learning rate x {prospect.lr_factor:.4g}"
    return (str(prospect.nodes), str(prospect.ranks), mesh, str(prospect.batch.accumulation), samples, str(prospect.spares))


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


_VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "mesh": ("mesh, batch and spares on these nodes and on every smaller allocation", _add_mesh, _mesh),
}
