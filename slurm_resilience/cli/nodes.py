"""Which nodes are out, why, since when, and what brings them back; and the switches for an admin.

Changes are for root or a Slurm operator, but for `forgive`, which is about one run of your own.  Nothing here touches a
drain that another person or tool has set.
"""

from __future__ import annotations

import argparse
import getpass
import json
import time
from pathlib import Path
from typing import Any

from slurm_resilience.cli import nodes_forgive
from slurm_resilience.errors import ConfigError, ExitCode, SlurmError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    from slurm_resilience.hooks.admin.configuration import CONFIG
    from slurm_resilience.hooks.admin.install import STATE

    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, text: str, *, node: bool = False, changes: bool = False) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        if node:
            sub.add_argument("node", metavar="NODE")
        sub.add_argument("--config", type=Path, default=CONFIG, metavar="FILE", help=f"the hooks' configuration ({CONFIG})")
        sub.add_argument("--state", type=Path, default=STATE, metavar="DIR", help=f"where ledgers are ({STATE})")
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        if changes:
            sub.add_argument("--dry-run", action="store_true", help="say what would be done")
        return sub

    add("list", "nodes that are out, flagged or on hold").add_argument("--all", action="store_true", help="all nodes")
    add("why", "why a node is out, since when, and what clears it", node=True)
    add("check", "run the checks on this machine, under the name of this node; changes nothing", node=True)
    drain = add("drain", "take a node out, within the budget and never over another reason", node=True, changes=True)
    drain.add_argument("--reason", required=True, help="a few words for the others")
    add("return", "bring back a node that we drained; a pending reboot stays", node=True, changes=True)
    hold = add("hold", "the hooks leave this node alone: they do not return it", node=True, changes=True)
    hold.add_argument("--reason", default="", help="a few words for the others")
    add("release", "take the hold away", node=True, changes=True)
    lemons = add("lemons", "suspects, ranked by seven signals from the ledgers; it suggests, it drains nothing")
    lemons.add_argument("--days", type=float, default=28, metavar="N", help="look back so far (default: 28)")
    add("budget", "how many nodes may still be drained")
    says = "take a node back that a run leaves out because ranks crashed there; for the run's user"
    nodes_forgive.configure(actions.add_parser("forgive", help=says, description=says, allow_abbrev=False))


def execute(args: argparse.Namespace) -> int:
    """Run one subcommand.  Whatever Slurm does not answer or refuses becomes one sentence."""
    if args.action == "forgive":
        return nodes_forgive.execute(args)
    from slurm_resilience.hooks import slurm

    try:
        code: int = _ACTIONS[args.action](args)
    except slurm.NoAnswer as error:
        raise SlurmError("Slurm does not answer", evidence=str(error), remedy="try again; nothing was assumed") from error
    except slurm.Refused as error:
        raise SlurmError("Slurm refused it", evidence=str(error)) from error
    return code


def _world(args: argparse.Namespace, node: str = "") -> Any:
    """The hooks' own view; without a configuration, its defaults with the commands that PATH has."""
    import os
    import shutil

    from slurm_resilience.hooks import world
    from slurm_resilience.hooks.admin import configuration

    if args.config.exists():
        settings = configuration.read(args.config)
    else:
        settings = configuration.compile_text("{}")
        for tool in ("scontrol", "squeue", "sacctmgr"):
            settings["slurm"][tool] = shutil.which(tool) or settings["slurm"][tool]
    settings["slurm"]["conf"] = settings["slurm"]["conf"] or os.environ.get("SLURM_CONF", "")
    return world.World("admin", node, settings, "", {}, 60.0)


def _node(args: argparse.Namespace, seen: list[Any]) -> Any:
    from slurm_resilience.errors import nearest

    for node in seen:
        if node.name == args.node:
            return node
    raise ConfigError(f"Slurm has no node {args.node!r}: {nearest(args.node, [node.name for node in seen])}")


def _row(node: Any) -> dict[str, Any]:
    ours = node.ours if node.drained else None
    return {
        "node": node.name, "state": node.state, "out": node.out, "ours": ours is not None,
        "check": ours.check if ours else None,
        "reason": node.reason or None, "user": node.user or None, "since": node.since or None,
        "flags": [note.what for note in node.notes if note.kind == "flag"], "held": node.held,
    }  # fmt: skip


def _list(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks import slurm

    rows = [_row(node) for node in slurm.all_nodes(_world(args))]
    rows = [row for row in rows if args.all or row["out"] or row["flags"] or row["held"]]
    if args.json:
        print(json.dumps(rows))
        return ExitCode.OK
    for row in rows:
        marks = ["hold"] * row["held"] + [f"flag:{flag}" for flag in row["flags"]]
        print(f"{row['node']:<12} {row['state']:<20} {' '.join(marks):<20} {row['reason'] or ''}".rstrip())
    if not rows:
        print("no node is out, flagged or on hold")
    return ExitCode.OK


def _why(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks import drain, files, ledger, slurm

    node = _node(args, slurm.all_nodes(_world(args)))
    row = _row(node)
    remembered = files.read_json(str(args.state / args.node / drain.OWN))
    row["clears"] = _what_clears(node, remembered)
    told = ("drained", "not_drained", "check", "hint", "stays_out", "returned")
    history = [entry for entry in ledger.entries(str(args.state / args.node / ledger.NAME)) if entry.get("what") in told]
    row["history"] = history[-5:]
    if args.json:
        print(json.dumps(row))
        return ExitCode.OK
    print(f"{node.name} is {node.state}")
    if node.reason:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(node.since))
        print(f"  reason   {node.reason}\n  by       {node.user} at {since}")
    print(f"  clears   {row['clears']}")
    for entry in row["history"]:
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(float(str(entry.get("at", 0)))))
        words = [str(entry[key]) for key in ("what", "check", "status", "decision", "why", "text") if entry.get(key)]
        print(f"  {at}  {' '.join(words)}")
    return ExitCode.OK


def _what_clears(node: Any, remembered: dict[str, Any]) -> str:
    from slurm_resilience.hooks import drain

    if not node.out:
        return "nothing has to: it is in service"
    if not node.ours:
        return "not ours: whoever set it"
    if node.held:
        return f"on hold: slurm-resilience nodes release {node.name}"
    if node.ours.check == "manual":
        return f"set by hand: slurm-resilience nodes return {node.name}"
    if remembered and drain.is_ours(node, remembered):
        return f"not by itself, for {drain.is_ours(node, remembered)}: slurm-resilience nodes return {node.name}"
    return f"by itself, after passes of {node.ours.check}; or slurm-resilience nodes return {node.name}"


def _check(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks import engine

    world = _world(args, args.node)
    chosen = engine.plans(world, "all")
    rows = [result.to_dict() for result in engine.run(world, chosen)]
    if args.json:
        print(json.dumps(rows))
    else:
        print("\n".join(f"{row['check']:<16} {row['status']:<8} {row['text']}" for row in rows))
    return 1 if any(row["status"] == "fail" for row in rows) else ExitCode.OK


def _say(args: argparse.Namespace, done: str, **fields: Any) -> int:
    if args.json:
        print(json.dumps({"node": args.node, "done": done, "dry_run": args.dry_run, **fields}))
    else:
        print(
            f"{args.node}: {'would be: ' if args.dry_run else ''}{done}" + "".join(f" ({value})" for value in fields.values())
        )
    return ExitCode.OK


def _drain(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks import budget, drain, reason, slurm

    world = _world(args, args.node)
    seen = slurm.all_nodes(world)
    _node(args, seen)
    now = time.time()
    decision = budget.decide(seen, args.node, "manual", drain.limits(world), now)
    if not decision.granted:
        raise ConfigError(f"{args.node} is not drained: {decision.kind}", evidence=decision.why,
                          remedy="scontrol update does it without asking")  # fmt: skip
    text = reason.compose("manual", "", "", "", now, "", f"{getpass.getuser()}: {args.reason}")
    if not args.dry_run:
        slurm.update(world, "State=DRAIN", f"Reason={text}")
    return _say(args, "drained", reason=text)


def _return(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks import reason, slurm

    world = _world(args, args.node)
    node = _node(args, slurm.all_nodes(world))
    if not node.drained or not node.ours:
        raise ConfigError(f"{args.node} is not ours to return", evidence=f"it is {node.state}: {node.reason or 'no reason'}",
                          remedy=f"if you are sure: scontrol update NodeName={args.node} State=UNDRAIN")  # fmt: skip
    if node.untouchable:
        raise ConfigError(f"{args.node} is left alone", evidence=f"it is {node.state}", remedy="wait until that is over")
    if not args.dry_run:
        slurm.put_back(world)
        comment = reason.with_note(reason.without_note(node.comment, "flag"), "back", node.ours.check, time.time())
        slurm.update(world, f"Comment={comment}")
    return _say(args, "returned", was=node.reason)


def _hold(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks import reason, slurm

    world = _world(args, args.node)
    node = _node(args, slurm.all_nodes(world))
    text = f"{getpass.getuser()} {args.reason}".strip()
    if not args.dry_run:
        slurm.update(world, "Comment=" + reason.with_note(node.comment, "hold", "node", time.time(), text))
    return _say(args, "on hold", by=text)


def _release(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks import reason, slurm

    world = _world(args, args.node)
    node = _node(args, slurm.all_nodes(world))
    if not node.held:
        return _say(args, "not on hold")
    if not args.dry_run:
        slurm.update(world, "Comment=" + reason.without_note(node.comment, "hold"))
    return _say(args, "released")


def _lemons(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks import ledger
    from slurm_resilience.hooks.admin import lemons

    since = time.time() - args.days * 86400
    excluded = _excluded_by(args)
    found = lemons.rank(
        lemons.signals(path.parent.name, ledger.entries(str(path)), since, excluded.get(path.parent.name, 0))
        for path in sorted(args.state.glob("*/ledger.jsonl"))
    )
    if args.json:
        print(json.dumps([suspect.to_dict() for suspect in found]))
        return ExitCode.OK
    if not found:
        print(f"no ledger under {args.state}: collect them there, one folder a node, or run this on a node")
    names = list(lemons.WEIGHTS)
    if found:
        print(f"{'node':<12} {'score':>5}  " + "  ".join(names))
    for suspect in found:
        print(f"{suspect.node:<12} {suspect.score:>5.1f}  " + "  ".join(f"{getattr(suspect, n):>{len(n)}}" for n in names))
    return ExitCode.OK


def _excluded_by(args: argparse.Namespace) -> dict[str, int]:
    """Node → jobs in the queue that exclude it; nothing where Slurm does not say: it is the least of the signals."""
    from slurm_resilience.hooks import slurm
    from slurm_resilience.slurm.nodeset import expand

    counts: dict[str, int] = {}
    try:
        rows = slurm.call(_world(args), "squeue", "-h", "-t", "all", "-O", "ExcNodes:2000").split()
    except (slurm.NoAnswer, slurm.Refused):
        return counts
    for row in rows:
        for name in expand(row) if row not in ("N/A", "(null)") else ():
            counts[name] = counts.get(name, 0) + 1
    return counts


def _budget(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks import budget, drain, slurm

    world = _world(args)
    seen = slurm.all_nodes(world)
    limits = drain.limits(world)
    out = [node.name for node in seen if node.out]
    most = budget.allowed(len(seen), limits["max_nodes"], limits["max_percent"])
    value = {
        "nodes": len(seen), "out": len(out), "ours": sum(1 for node in seen if node.drained and node.ours), "allowed": most,
        "left": max(0, most - len(out)), "limits": limits,
    }  # fmt: skip
    if args.json:
        print(json.dumps(value))
    else:
        print(f"{value['out']} of {value['nodes']} nodes are out ({value['ours']} by us); {most} may be; {value['left']} left")
    return ExitCode.OK


_ACTIONS = {
    "list": _list, "why": _why, "check": _check, "drain": _drain, "return": _return, "hold": _hold, "release": _release,
    "lemons": _lemons, "budget": _budget,
}  # fmt: skip
