"""Prints the reference pages from the code, so that they cannot say something else.

python docs/reference/generate.py            write the pages
python docs/reference/generate.py --check    exit 1 when a page is not what the code says
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slurm_resilience import cli
from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import EXIT_CODE_OF, Cause, ExitCode
from slurm_resilience.integrations import own_file
from slurm_resilience.observe.vocabulary import EVENTS
from slurm_resilience.progress.contract import RankContract
from slurm_resilience.runtime import surroundings

HERE = Path(__file__).parent
NOTE = "<!-- Printed by docs/reference/generate.py; change the code, then run it. -->"

EXIT_CODES: dict[ExitCode, str] = {
    ExitCode.OK: "The run is complete.",
    ExitCode.USAGE: "The command line was not understood; nothing was done.",
    ExitCode.INTERNAL: "A fault of slurm-resilience itself, or of the machine, that no other code fits.",
    ExitCode.REQUEUED: "The job was put back into the queue; it is not over.",
    ExitCode.CONFIG_ERROR: "The configuration makes no sense; nothing was queued or started, unless the script found it.",
    ExitCode.APP_ERROR: "The training code itself fails, at the same place each time.",
    ExitCode.RANK_CRASH: "Ranks kept dying without progress in between.",
    ExitCode.HANG: "Ranks kept standing still without progress in between.",
    ExitCode.NODE_LOST: "Too many nodes were lost, or too few are left.",
    ExitCode.BAD_CHECKPOINT: "No checkpoint can be trusted.",
    ExitCode.OOM: "Ranks kept running out of memory.",
    ExitCode.CANCELLED: "Somebody cancelled the job; it was not put back.",
    ExitCode.TIME_LIMIT: "The time limit was reached and the job could not be put back.",
    ExitCode.PREEMPTED: "The job was preempted and could not be put back.",
    ExitCode.LAUNCH_FAILED: "Agents or ranks could not be started, or Slurm refused the job.",
}

CAUSES: dict[Cause, str] = {
    Cause.PREEMPTION: "Slurm takes the nodes for a job of higher priority.",
    Cause.TIME_LIMIT: "The allocation reaches its time limit.",
    Cause.NODE_LOST: "A node is silent or gone.",
    Cause.NODE_DRAINED: "A node was drained under the job.",
    Cause.LAUNCH_FAILED: "Agents or ranks could not be started.",
    Cause.RANK_CRASH: "A rank died: a signal, or an exit before its end.",
    Cause.HANG: "A rank lives and makes no progress.",
    Cause.BAD_CHECKPOINT: "A checkpoint could not be loaded or does not give what it promises.",
    Cause.OOM: "A rank ran out of memory.",
    Cause.APP_ERROR: "The training code raised an exception of its own.",
    Cause.CONFIG_ERROR: "What was asked for makes no sense.",
    Cause.CANCELLED: "Somebody cancelled the job.",
    Cause.UNKNOWN: "We could not find out.",
}

CONTRACT: dict[str, str] = {
    "run_dir": "the run folder",
    "run_id": "the run's name, the same over all allocations",
    "attempt": "number of this launch of all ranks; it only grows and fences everything older",
    "restart_count": "Slurm's restart count of the job",
    "job_id": "Slurm's job id, empty without Slurm",
    "node": "the node's name",
    "page": "the shared-memory page for progress and orders",
    "facts": "the agent's socket for facts",
    "checkpoints": "the checkpoint root",
    "settings": "JSON: the part of the configuration that ranks act on",
    "plan": "JSON: ranks, nodes, mesh and batch of this attempt; packed from 64 nodes on, read it as `run.plan`",
}


def markdown(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(head: list[str], rows: list[list[object]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield "| " + " | ".join(markdown(cell) for cell in row) + " |"


# --- the command line -------------------------------------------------------------------------------------------------


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command and subcommand with its parser, in the order of the help."""
    for name, (module_name, summary) in cli.COMMANDS.items():
        module = importlib.import_module(module_name)
        parser = cli._Parser(prog=f"slurm-resilience {name}", description=module.__doc__ or summary, allow_abbrev=False)
        module.configure(parser)
        yield from walk(parser.prog, parser)


def walk(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                yield from walk(f"{name} {word}", child)


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """What can stand on the line, without --help, the choice of a subcommand, and sbatch's own."""
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)) or action.help is argparse.SUPPRESS:
            continue
        metavar = action.metavar or (None if action.option_strings else action.dest)
        if isinstance(metavar, tuple):
            metavar = " ".join(metavar)
        if action.choices is not None:
            metavar = "|".join(map(str, action.choices))
        elif action.option_strings and action.nargs != 0:
            metavar = metavar or action.dest.upper()
        spelled = ", ".join(action.option_strings)
        yield f"{spelled} {metavar or ''}".strip(), action


def cli_page() -> Iterator[str]:
    yield from ("# Commands", "", NOTE, "")
    yield from ("`slurm-resilience COMMAND …`, also as `python -m slurm_resilience COMMAND …`.", "")
    yield from table(["command", "what it does"], [[f"`{name}`", text] for name, (_, text) in cli.COMMANDS.items()])
    for name, parser in parsers():
        yield from ("", f"## `{name}`", "", (parser.description or "").strip(), "")
        rows: list[list[object]] = []
        for spelled, action in options(parser):
            # argparse fills %(default)s and the like when it prints, and needs a terminal's width for the rest
            shown = (action.help or "") % {"default": action.default, "prog": parser.prog, "dest": action.dest}
            silent = action.default in (None, False, [], "", argparse.SUPPRESS)
            rows.append([f"`{spelled}`", shown, "" if silent else f"`{action.default}`"])
        yield from table(["argument", "meaning", "default"], rows) if rows else ("No options.",)


# --- the configuration ------------------------------------------------------------------------------------------------


def type_name(annotation: object) -> str:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " or ".join("none" if part is type(None) else type_name(part) for part in typing.get_args(annotation))
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' for value in typing.get_args(annotation))
    if origin is not None:
        inner = ", ".join("…" if part is Ellipsis else type_name(part) for part in typing.get_args(annotation))
        return f"{origin.__name__} of {inner}"
    return getattr(annotation, "__name__", str(annotation))


def config_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its field, sections opened."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from config_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def bounds(field: Any) -> str:
    words = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [f"{sign} {getattr(rule, key):g}" for rule in field.metadata for key, sign in words.items() if hasattr(rule, key)]
    return ", ".join(found)


def config_page() -> Iterator[str]:
    yield from ("# Configuration", "", NOTE, "")
    yield from (
        "One configuration, from a YAML file, the command line or keyword arguments; later ones win, the environment never.",
        "A key that is not listed here is an error that names the nearest one.  `a.b` means key `b` in section `a`.",
        "",
    )
    rows: list[list[object]] = [
        [f"`{key}`", type_name(field.annotation), bounds(field), f"`{field.default}`", field.description or ""]
        for key, field in config_keys(ResilienceConfig)
    ]
    yield from table(["key", "type", "bounds", "default", "meaning"], rows)


# --- the rest ---------------------------------------------------------------------------------------------------------


def events_page() -> Iterator[str]:
    yield from ("# Events", "", NOTE, "")
    yield from (
        "`RUN_DIR/events.jsonl`: append-only, one fact a line, written by the supervisor alone.  Every line has `v` (format",
        "version), `seq` (grows over the whole life of the run), `t` (wall-clock seconds, when it happened), `restart`",
        "(Slurm's restart count), `attempt` and `event`; facts of one rank have `rank` and `node`.",
        "`slurm-resilience events RUN_DIR` shows them.  `RUN_DIR/metrics.jsonl` has the whole loss curve.",
        "",
    )
    yield from table(
        ["event", "what it says", "fields"],
        [[f"`{name}`", entry.says, ", ".join(f"`{field}`" for field in entry.fields)] for name, entry in EVENTS.items()],
    )


def exit_codes_page() -> Iterator[str]:
    yield from ("# Exit codes and causes", "", NOTE, "")
    reach = (
        "The codes of `slurm-resilience run` reach the batch script, and so `sacct`, unchanged. Where Slurm itself ended the "
        "run (it was requeued or cancelled), `sacct` keeps the state, REQUEUED, PREEMPTED or CANCELLED, and no code; the run's "
        "own word is in its events. A job from which a lost node was taken has one more line, RESIZING, before its last "
        "(`sacct -D`)."
    )
    yield from (reach, "")
    yield from table(["code", "name", "meaning"], [[int(code), f"`{code.name}`", EXIT_CODES[code]] for code in ExitCode])
    yield from ("", "## Causes", "", "Why an attempt ended; the words stand in events and budgets.", "")
    yield from table(
        ["cause", "meaning", "exit code when it ends the run"],
        [[f"`{cause}`", CAUSES[cause], f"{int(EXIT_CODE_OF[cause])} `{EXIT_CODE_OF[cause].name}`"] for cause in Cause],
    )


def environment_page() -> Iterator[str]:
    yield from ("# Environment of a rank", "", NOTE, "")
    yield from (
        "Besides what torch expects (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR`,",
        "`MASTER_PORT`, `TORCHELASTIC_*`), an agent sets these.  They are read by `Run`; scripts may read them too.",
        "",
    )
    yield from table(["variable", "meaning"], [[f"`{name}`", CONTRACT[field]] for field, name in RankContract._NAMES.items()])
    yield from (
        "",
        f"Under `--checkpoint-file NAME`, `{own_file.VARIABLE}` is the path where the script finds its own checkpoint and",
        f"writes the next one.  A batch script sets `{surroundings.LEAD_VARIABLE}` to the seconds of its `--signal` line.",
    )


PAGES = {
    "cli.md": cli_page,
    "config.md": config_page,
    "events.md": events_page,
    "exit-codes.md": exit_codes_page,
    "environment.md": environment_page,
}


def differing() -> list[str]:
    """The pages that do not say what the code says."""
    return [
        name
        for name, page in PAGES.items()
        if not (HERE / name).exists() or (HERE / name).read_text(encoding="utf-8") != "\n".join(page()) + "\n"
    ]


def main() -> int:
    wrong = differing()
    if sys.argv[1:] == ["--check"]:
        for name in wrong:
            print(f"docs/reference/{name} is not what the code says; run: python docs/reference/generate.py")
        return 1 if wrong else 0
    for name in wrong:
        (HERE / name).write_text("\n".join(PAGES[name]()) + "\n", encoding="utf-8")
        print(f"wrote docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
