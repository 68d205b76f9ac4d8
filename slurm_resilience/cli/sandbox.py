"""A real Slurm cluster on this machine, with faults on demand.

Every node has a network, a process table, a host name, a clock since boot and a /dev/shm of its own; jobs are
submitted by an ordinary user (alice).  Needs root; installs Debian's Slurm when it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from slurm_resilience.errors import ConfigError, ExitCode, SandboxError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    from slurm_resilience.sandbox import faults

    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    up = _action(actions, "up", "start it, repair it, or give it other settings")
    up.add_argument("--nodes", type=int, default=4, metavar="N", help="number of nodes (default: 4)")
    up.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of slurm.conf, low.KEY or high.KEY"
    )
    up.add_argument("--no-accounting", action="store_true", help="without slurmdbd and MariaDB")
    up.add_argument("--private-tmp", action="store_true", help="each node has its own /tmp, as real nodes do")

    _action(actions, "down", "stop it; only its logs stay")
    _json(_action(actions, "status", "what runs, and where its logs are"))

    _where(_action(actions, "shell", "a login shell of alice on the login host"))
    run = _where(_action(actions, "exec", "run a command as alice on the login host: exec [options] -- CMD …"))
    run.add_argument("argv", nargs="+", metavar="CMD", help="the command and its arguments, after --")

    fault = _json(_action(actions, "fault", "hurt it; returns when the fault has happened"))
    faults.configure(fault)
    _json(_action(actions, "heal", "undo every fault; cancels all jobs"))
    _json(_action(actions, "list", "the sandboxes on this machine"))


def _action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    if name != "list":
        parser.add_argument("--name", default="default", help="which sandbox (default: default)")
    return parser


def _json(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _where(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--user", default="alice", metavar="U", help="another user of this machine")
    who.add_argument("--root", action="store_true", help="as root")
    parser.add_argument("--host", default="login", help="another host: a node, or ctl (default: login)")
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VALUE", help="a variable for the command")
    return parser


def execute(args: argparse.Namespace) -> int:
    """Run one subcommand."""
    action: int = _ACTIONS[args.action](args)
    return action


def _pairs(texts: list[str], option: str) -> dict[str, str]:
    out = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} {text!r} must be KEY=VALUE")
        out[key] = value
    return out


def _up(args: argparse.Namespace) -> int:
    from slurm_resilience.cli import progress
    from slurm_resilience.sandbox import state
    from slurm_resilience.sandbox.cluster import Sandbox
    from slurm_resilience.sandbox.layout import Layout

    started, layout = time.monotonic(), Layout(args.name)

    def booted() -> int:
        found = state.load(layout)
        return len(found.hosts) if found is not None else 0

    with progress.of_count(f"sandbox {args.name}: machines up", args.nodes + 2, booted):
        sandbox = Sandbox.up(
            nodes=args.nodes, name=args.name, settings=_pairs(args.set, "--set"), accounting=not args.no_accounting,
            private_tmp=args.private_tmp,
        )  # fmt: skip
    print(f"sandbox {args.name}: {args.nodes} nodes up after {time.monotonic() - started:.1f} s")
    suffix = "" if args.name == "default" else f" --name {args.name}"
    print(f"  slurm-resilience sandbox exec{suffix} -- sinfo\n  logs in {sandbox.layout.log}")
    for warning in sandbox.warnings():
        print(f"  warning: {warning}", file=sys.stderr)
    return ExitCode.OK


def _down(args: argparse.Namespace) -> int:
    from slurm_resilience.sandbox.cluster import Sandbox

    existed = Sandbox.remove(args.name)
    print(f"sandbox {args.name}: {'down' if existed else 'was not up'}")
    return ExitCode.OK


def _status(args: argparse.Namespace) -> int:
    from slurm_resilience.sandbox.cluster import Sandbox

    try:
        status = Sandbox.attach(args.name).status()
    except SandboxError as error:
        if not args.json:
            raise
        status = {"name": args.name, "up": False, "why": str(error)}
    if args.json:
        print(json.dumps(status))
    else:
        print(_status_text(status))
    return ExitCode.OK if status["up"] else 1


def _status_text(status: dict[str, Any]) -> str:
    lines = [f"sandbox {status['name']}: {'up' if status['up'] else 'DAMAGED'}; user {status['user']}; {status['slurm_conf']}"]
    lines += [f"  {name:<10} {f'pid {pid}' if pid else 'NOT RUNNING'}" for name, pid in status["services"].items()]
    for node in status["nodes"]:
        faults = [
            word for word, is_so in (("off", not node["power"]), ("cut", node["cut"]), ("frozen", node["frozen"])) if is_so
        ]
        booted = time.strftime("%H:%M:%S", time.localtime(node["booted_at"]))
        lines.append(f"  {node['name']:<10} {node['slurm'] or '?':<16} booted {booted} {' '.join(faults)}".rstrip())
    lines += [f"  setting    {key}={value}" for key, value in status["settings"].items()]
    lines += [f"  broken     {command} ({how})" for command, how in status["broken_commands"].items()]
    lines += [f"  disk       {path}" for path in status["disks"]]
    lines += [f"  log        {path}" for path in status["logs"].values()]
    return "\n".join(lines)


def _shell(args: argparse.Namespace) -> int:
    args.argv = ["/bin/bash", "-i"]  # not -l: /etc/profile would set PATH anew, without the interpreter's folder
    return _exec(args)


def _exec(args: argparse.Namespace) -> int:
    from slurm_resilience.sandbox.cluster import Sandbox

    user = "root" if args.root else args.user
    sandbox = Sandbox.attach(args.name)
    line = sandbox.exec_command(args.argv, user=user, host=args.host, env=_pairs(args.env, "--env"))
    sys.stdout.flush()
    os.execv(line[0], line)  # noqa: S606


def _fault(args: argparse.Namespace) -> int:
    from slurm_resilience.sandbox import faults
    from slurm_resilience.sandbox.cluster import Sandbox

    happened = faults.inject(Sandbox.attach(args.name), args.fault, faults.nodes_of(args), faults.options_of(args))
    print(json.dumps(happened) if args.json else faults.sentence(happened))
    return ExitCode.OK


def _heal(args: argparse.Namespace) -> int:
    from slurm_resilience.sandbox.cluster import Sandbox

    sandbox = Sandbox.attach(args.name)
    sandbox.heal()
    print(json.dumps(sandbox.status()) if args.json else f"sandbox {args.name}: all nodes in service, no job left")
    return ExitCode.OK


def _list(args: argparse.Namespace) -> int:
    from slurm_resilience.sandbox.cluster import Sandbox

    names = Sandbox.names()
    if args.json:
        print(json.dumps(names))
    elif names:
        print("\n".join(names))
    return ExitCode.OK


_ACTIONS = {
    "up": _up, "down": _down, "status": _status, "shell": _shell, "exec": _exec, "fault": _fault, "heal": _heal, "list": _list,
}  # fmt: skip
