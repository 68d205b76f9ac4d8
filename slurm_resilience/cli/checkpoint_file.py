"""The two options of `run` and `submit` for scripts that know nothing of us and keep one checkpoint file of their own."""

from __future__ import annotations

import argparse

from slurm_resilience.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument(
        "--checkpoint-file", metavar="NAME",
        help="for a script without a Run: the one file that it saves into and goes on from; it finds the path in "
        "RESILIENCE_CHECKPOINT_FILE, and {checkpoint} in its arguments stands for it",
    )  # fmt: skip
    parser.add_argument(
        "--resume-with", metavar="ARGS", default="",
        help="arguments for the script when there is a file to go on from, e.g. '--resume {checkpoint}'",
    )  # fmt: skip


def command_of(args: argparse.Namespace) -> list[str]:
    """What every rank runs.  Raises :class:`ConfigError` for nonsense."""
    if not args.checkpoint_file:
        if args.resume_with:
            raise ConfigError(
                "--resume-with says how to go on from a file, and there is none", remedy="add --checkpoint-file NAME"
            )
        return list(args.argv)
    from slurm_resilience.integrations.own_file import command

    return list(command(args.argv, args.checkpoint_file, args.resume_with))
