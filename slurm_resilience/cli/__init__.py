"""``slurm-resilience …``: one table of commands, each loaded only when it is called."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from slurm_resilience import __version__
from slurm_resilience.errors import ConfigError, ExitCode, ResilienceError, nearest

# name -> (module with configure(parser) and execute(args) -> int, one line for --help)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("slurm_resilience.cli.run", "supervise a training command inside an allocation (or --local N)"),
    "submit": ("slurm_resilience.cli.submit", "submit a training command to Slurm, resilient"),
    "status": ("slurm_resilience.cli.status", "how a run stands: what it does now, nodes, checkpoints, incidents, budgets"),
    "requeue": ("slurm_resilience.cli.requeue", "give a job other nodes now: it saves, and starts again in seconds"),
    "watch": ("slurm_resilience.cli.watch", "get requeued jobs started in seconds, and free those that are stuck"),
    "logs": ("slurm_resilience.cli.logs", "what the ranks of a run printed, over relaunches"),
    "events": ("slurm_resilience.cli.events", "the facts and incidents of a run"),
    "explain": ("slurm_resilience.cli.explain", "why: a page for each incident, or for one node or checkpoint"),
    "report": ("slurm_resilience.cli.report", "one page about a run: timeline, loss, incidents, where the time went"),
    "trace": ("slurm_resilience.cli.trace", "the incidents of a run as OpenTelemetry traces"),
    "checkpoints": ("slurm_resilience.cli.checkpoints", "list, check, repair and pin checkpoints"),
    "plan": ("slurm_resilience.cli.plan", "meshes, checkpoint intervals and effective training time, before you submit"),
    "nodes": ("slurm_resilience.cli.nodes", "which nodes are out and why; drain, return, hold"),
    "doctor": ("slurm_resilience.cli.doctor", "what this cluster will do to your job, and what is dangerous in it"),
    "templates": ("slurm_resilience.cli.templates", "batch scripts to copy, with your values filled in"),
    "rehearse": ("slurm_resilience.cli.rehearse", "hurt your own job in the sandbox, and see what it survives"),
    "hooks": ("slurm_resilience.cli.hooks", "install, check and rehearse the admin's prolog, epilog and node checks"),
    "sandbox": ("slurm_resilience.cli.sandbox", "a real Slurm cluster on this machine, with faults on demand"),
}


class _Parser(argparse.ArgumentParser):
    """argparse whose errors name the nearest valid option."""

    def error(self, message: str) -> None:  # type: ignore[override]
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            word = message.removeprefix(prefix).split()[0]
            options = [o for action in self._actions for o in action.option_strings]
            if word.startswith("-") and options:
                hint = nearest(word.split("=")[0], options)
                # Without a guess, --help is the better list: it says what each option is for.
                message = f"unknown option {word!r}" + (f": {hint}" if hint.startswith("did you mean") else "")
            if word == "--":
                message = "`--` stands where no command can follow: put all options before the first word that is none"
            if self.prog.endswith(" rehearse"):
                message += "; what belongs to the script goes into one word: rehearse train.py --args='--lr 1'"
        choice = re.fullmatch(r"argument (.+): invalid choice: (['\"].+['\"]) \(choose from (.+)\)", message)
        if choice:
            given = str(ast.literal_eval(choice.group(2)))
            words = [option.strip(" '") for option in choice.group(3).split(",")]
            message = f"unknown {choice.group(1)} {given!r}: {nearest(given, words)}"
            if self.prog.endswith(" checkpoints") and os.path.isdir(given):
                message = f"{given!r} is a folder, and an ACTION is needed before it: `{self.prog} list {shlex.quote(given)}`"
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}\nSee '{self.prog} --help'.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is unknown here, where the parser of the subcommand still knows its own options."""
        from slurm_resilience.cli.command_words import misplaced

        if said := misplaced(self, sys.argv[1:] if args is None else args):
            self.error(said)
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed, rest


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: slurm-resilience COMMAND [options]\n\n"
        "Keep PyTorch training on Slurm alive: detect, save, requeue, reshard, verify, go on.\n\n"
        f"commands:\n{lines}\n\n"
        "'slurm-resilience COMMAND --help' explains a command; --version prints the release.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; every error of ours becomes one paragraph on stderr and its documented exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return ExitCode.OK if words else ExitCode.USAGE
    if words[0] in ("-V", "--version"):
        print(f"slurm-resilience {__version__}")
        return ExitCode.OK
    name = words[0]
    if name not in COMMANDS:
        print(f"slurm-resilience: unknown command {name!r}: {nearest(name, COMMANDS)}", file=sys.stderr)
        return ExitCode.USAGE
    module_name, summary = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = _Parser(prog=f"slurm-resilience {name}", description=module.__doc__ or summary, allow_abbrev=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    module.configure(parser)
    args = parser.parse_args(words[1:])
    try:
        return int(module.execute(args))
    except ResilienceError as error:
        print(f"slurm-resilience {name}: {error}", file=sys.stderr)
        return error.exit_code
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        if error.filename is None:
            raise
        what = f"You may not use {error.filename}"
        if isinstance(error, IsADirectoryError):
            what = f"{error.filename} is a folder, and a file is needed there"
        elif isinstance(error, NotADirectoryError):
            what = f"{error.filename} cannot be reached: what should be a folder is a file"
        refused = ConfigError(what, evidence=f"{type(error).__name__}: {error}")
        print(f"slurm-resilience {name}: {refused}", file=sys.stderr)
        return refused.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return ExitCode.OK
    except KeyboardInterrupt:
        return 130
