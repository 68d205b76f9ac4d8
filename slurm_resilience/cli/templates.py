"""Batch scripts to copy: list them, and make one with your values filled in.

slurm-resilience templates list
slurm-resilience templates render multi-node --set nodes=2-8 --set gpus_per_node=4 -o train.sbatch
slurm-resilience templates render torchrun --set command='python train.py --snapshot {checkpoint}' | sbatch
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from slurm_resilience.errors import ConfigError, ExitCode


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "the templates, and what can be set in each"
    shown = actions.add_parser("list", help=text, description=text, allow_abbrev=False)
    shown.add_argument("name", nargs="?", metavar="NAME", help="one template: all that can be set in it")
    shown.add_argument("--json", action="store_true", help="print one JSON document")
    text = "print a batch script made from a template"
    made = actions.add_parser("render", help=text, description=text, allow_abbrev=False)
    made.add_argument("name", metavar="NAME", help="which template")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a value; `templates list NAME` has them")
    made.add_argument("-o", "--output", metavar="FILE", help="write it there instead; a file that is there is not replaced")


def execute(args: argparse.Namespace) -> int:
    """Run one subcommand."""
    return _list(args) if args.action == "list" else _render(args)


def _list(args: argparse.Namespace) -> int:
    from slurm_resilience.submit.rendering import TEMPLATES, values_of

    if args.name is None:
        if args.json:
            print(json.dumps({name: template.says for name, template in TEMPLATES.items()}))
        else:
            width = max(map(len, TEMPLATES))
            print("\n".join(f"{name:<{width}}  {template.says}" for name, template in TEMPLATES.items()))
        return ExitCode.OK
    known = values_of(args.name)
    if args.json:
        print(json.dumps({key: {"default": default, "says": says} for key, (default, says) in known.items()}))
    else:
        width = max(map(len, known))
        lines = [
            f"{key:<{width}}  {says}{f' (default: {default})' if default else ''}" for key, (default, says) in known.items()
        ]
        print("\n".join(lines))
    return ExitCode.OK


def _render(args: argparse.Namespace) -> int:
    from slurm_resilience.submit.rendering import render

    values = {}
    for pair in args.set:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r} is not KEY=VALUE", remedy="write it like --set nodes=2-8")
        values[key.strip().replace("-", "_")] = value
    text = render(args.name, values)
    if args.output is None:
        sys.stdout.write(text)
        return ExitCode.OK
    try:
        fd = os.open(args.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{args.output} is there already", remedy="take another name, or remove it first") from None
    except OSError as error:
        raise ConfigError(f"{args.output} cannot be written", evidence=str(error)) from None
    print(f"{args.output}: {args.name}; submit it with `sbatch {Path(args.output)}`")
    return ExitCode.OK
