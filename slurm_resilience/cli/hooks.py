"""Install, check and rehearse the admin's hooks: prolog, epilog, node check, requeue expediter.

Every check starts in observe mode: it records what it would do.  Nothing is written to slurm.conf without --write.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from slurm_resilience.errors import ConfigError, ExitCode


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    from slurm_resilience.hooks.admin.configuration import CONFIG
    from slurm_resilience.hooks.admin.entries import KINDS
    from slurm_resilience.hooks.admin.install import PREFIX, STATE

    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--prefix", type=Path, default=PREFIX, metavar="DIR", help=f"root's folder for the hooks ({PREFIX})")
        sub.add_argument("--config", type=Path, default=CONFIG, metavar="FILE", help=f"the configuration ({CONFIG})")
        sub.add_argument("--state", type=Path, default=STATE, metavar="DIR", help=f"ledgers and verdicts ({STATE})")
        sub.add_argument("--python", metavar="FILE", help="the interpreter of the nodes (default: the system's)")
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        return sub

    def changing(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="a node image instead of this machine")
        sub.add_argument("--slurm-conf", type=Path, metavar="FILE", help="the slurm.conf whose Prolog … is chained")
        sub.add_argument("--dry-run", action="store_true", help="say what would change")

    install = add("install", "put the hooks in place; prints the lines for slurm.conf")
    changing(install)
    install.add_argument("--write", action="store_true", help="also write the lines into --slurm-conf")
    install.add_argument(
        "--only", nargs="+", choices=sorted(KINDS.values()), default=sorted(KINDS.values()), help="only these hooks"
    )
    uninstall = add("uninstall", "remove them; slurm.conf gets back what it had before")
    changing(uninstall)
    uninstall.add_argument("--purge", action="store_true", help="also the configuration, the ledgers and the verdicts")
    check = add("check", "validate the configuration, permissions and slurm.conf; ends with 1 when something is wrong")
    check.add_argument("--slurm-conf", type=Path, metavar="FILE", help="also look at this slurm.conf")
    check.add_argument("--write", action="store_true", help="compile the configuration for the hooks when it is right")
    check.add_argument("--roll-back", action="store_true", help="compile the configuration before this one again")
    add("status", "what the hooks have seen and done, from the ledgers of this machine").add_argument(
        "--days", type=float, default=7, metavar="N", help="look back so far (default: 7)"
    )
    simulate = add("simulate", "run the checks here and now, and say what would follow; nothing is changed")
    simulate.add_argument("--context", default="all", choices=["all", "prolog", "epilog", "periodic", "boot"])
    simulate.add_argument("--node", default=os.uname().nodename.split(".")[0], help="under this name (default: the host's)")
    simulate.add_argument(
        "--recorded", default="", metavar="DIR", help="a recorded /proc, /sys, /dev in place of this machine's"
    )


def execute(args: argparse.Namespace) -> int:
    """Run one subcommand."""
    code: int = _ACTIONS[args.action](args)
    return code


def _places(args: argparse.Namespace) -> Any:
    from slurm_resilience.hooks.admin import install
    from slurm_resilience.hooks.admin.entries import Places

    for path in (args.prefix, args.config, args.state):
        if not path.is_absolute():
            raise ConfigError(f"{path} must be absolute", evidence="the hooks run in a folder that Slurm chooses")
    return Places(args.prefix, args.config, args.state, install.python_of(args.python))


def _root_only() -> None:
    if os.geteuid() != 0:
        raise ConfigError("Hooks are root's", evidence=f"this process runs as uid {os.geteuid()}", remedy="use sudo")


def _install(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks.admin import install

    _root_only()
    if args.write and args.slurm_conf is None:
        raise ConfigError("--write needs --slurm-conf", evidence="where Slurm's configuration is differs from site to site")
    todo = install.plan(_places(args), root=args.root, slurm_conf=args.slurm_conf, kinds=tuple(args.only))
    if args.dry_run:
        changed = [str(change.path) for change in todo.changes if change.needed()]
    else:
        changed = install.apply(todo, write_slurm_conf=args.write)
    if args.json:
        print(json.dumps({"dry_run": args.dry_run, "changed": changed, "slurm_conf": todo.lines}))
        return ExitCode.OK
    for path in changed:
        print(f"{'would write' if args.dry_run else 'wrote'} {path}")
    if args.slurm_conf is None and args.root == Path("/"):
        print("no --slurm-conf: a Prolog, Epilog or HealthCheckProgram that is there already is not chained")
    print(
        "slurm.conf:" + (" (written)" if args.write and not args.dry_run else " add these lines, then `scontrol reconfigure`")
    )
    for key, value in todo.lines.items():
        print(f"{key}={value}")
    return ExitCode.OK


def _uninstall(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks.admin import install

    _root_only()
    places = _places(args)
    if args.dry_run:
        gone = [str(places.prefix)] + ([str(places.state), str(places.config)] if args.purge else [])
    else:
        gone = install.uninstall(places, root=args.root, slurm_conf=args.slurm_conf, purge=args.purge)
    if args.json:
        print(json.dumps({"dry_run": args.dry_run, "changed": gone}))
    else:
        print("\n".join(f"{'would remove or restore' if args.dry_run else 'removed or restored'} {path}" for path in gone))
        if args.dry_run or (places.prefix / "bin").is_dir():
            print(f"{places.prefix}/bin stays, with entries that do nothing: a missing one would drain every node.\n"
                  "Next: scontrol reconfigure; then hooks uninstall --purge, or remove that folder.")  # fmt: skip
    return ExitCode.OK


def _check(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks.admin import configuration, inspect

    places = _places(args)
    if args.write or args.roll_back:
        _root_only()
        compile_it = configuration.roll_back if args.roll_back else configuration.compile_file
        compile_it(places.config, places.compiled, args.slurm_conf)
    found = inspect.inspect(places, args.slurm_conf)
    wrong = any(finding.level == "error" for finding in found)
    if args.json:
        print(json.dumps({"ok": not wrong, "findings": [finding.to_dict() for finding in found]}))
    else:
        for finding in found:
            print(f"{finding.level}: {finding.text}")
        print("the hooks are not in order" if wrong else "the hooks are in order")
    return 1 if wrong else ExitCode.OK


def _status(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks import files, ledger

    since = time.time() - args.days * 86400
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(args.state.glob("*/ledger.jsonl")):
        counts: dict[str, int] = {}
        would: dict[str, int] = {}
        for entry in ledger.entries(str(path)):
            if files.number(entry.get("at")) >= since:
                what = str(entry.get("what"))
                counts[what] = counts.get(what, 0) + 1
                if what == "would_drain":
                    would[str(entry.get("check"))] = would.get(str(entry.get("check")), 0) + 1
        told = files.read_json(str(path.with_name("verdict.json"))).get("checks")
        whole = {k: v for k, v in told.items() if isinstance(v, dict)} if isinstance(told, dict) else {}
        bad = {k: str(v.get("text", "")) for k, v in whole.items() if v.get("status") != "ok"}
        rows[path.parent.name] = {"events": counts, "would_drain": would, "not_ok": bad}
    if args.json:
        print(json.dumps(rows))
        return ExitCode.OK
    if not rows and args.state.is_dir() and not os.access(args.state, os.R_OK | os.X_OK):
        raise ConfigError(f"{args.state} is root's", evidence=f"uid {os.geteuid()} may not read it", remedy="use sudo")
    if not rows:
        print(f"no ledger under {args.state}: no hook has run here, or nothing has ever happened")
    for node, row in rows.items():
        print(
            f"{node}: " + (", ".join(f"{count} {what}" for what, count in sorted(row["events"].items())) or "nothing happened")
        )
        for check, count in sorted(row["would_drain"].items()):
            print(f"  would have drained {count} times: {check}")
        for check, text in sorted(row["not_ok"].items()):
            print(f"  {check}: {text}")
    return ExitCode.OK


def _simulate(args: argparse.Namespace) -> int:
    from slurm_resilience.hooks import engine, settle, world
    from slurm_resilience.hooks.admin import configuration

    here = world.World("simulate", args.node, configuration.read(args.config), "", {}, 60.0)
    chosen = engine.plans(here, args.context)
    rows = []
    for plan, result in zip(chosen, engine.run(here, chosen, root=args.recorded), strict=True):
        rows.append({**result.to_dict(), "mode": plan.mode, "would": settle.wish(plan, result, plan.after_fails)})
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row['check']:<16} {row['status']:<8} {row['mode']:<8} would: {row['would']:<8} {row['text']}")
    sys.stdout.flush()
    return ExitCode.OK


_ACTIONS = {"install": _install, "uninstall": _uninstall, "check": _check, "status": _status, "simulate": _simulate}
