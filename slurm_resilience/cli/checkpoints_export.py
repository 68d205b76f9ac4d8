"""``checkpoints export``: weights for those who do not have us."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from slurm_resilience._atomic import fsync_dir
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.errors import CorruptCheckpoint
from slurm_resilience.checkpoint.payload import FOLDER
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.cli.checkpoints_pick import LATEST, THREADS, find, read_again, say_passed_over
from slurm_resilience.cli.checkpoints_text import in_short, print_json, say
from slurm_resilience.errors import ConfigError, ExitCode

_FORMATS = (".safetensors", ".pt")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", default=LATEST)
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        required=True,
        help="where to; the ending is the format: .safetensors or .pt. A framework's own files go there as they are",
    )
    parser.add_argument("--model", metavar="LABEL", help="which of several registered models (default: the only one)")
    parser.add_argument("--force", action="store_true", help="replace the file at PATH")


def export(store: CheckpointStore, args: argparse.Namespace) -> int:
    entry = find(store, args.name)
    with store.reading(entry):  # the run may be training, and prune what is old by then
        return _export(store, entry, Path(args.output), args)


def _export(store: CheckpointStore, entry: Entry, out: Path, args: argparse.Namespace) -> int:
    if args.name == LATEST:
        say_passed_over(store, entry)
    fixed = out.exists() and not out.is_file()  # a folder, or a device: for root, /dev/null would be gone
    if os.path.lexists(out) and (fixed or not args.force):
        raise ConfigError(
            f"{out} is there already",
            evidence="nothing was written",
            remedy="give another path" + ", or --force" * (not fixed),
        )
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {out.absolute().parent}", remedy="make it first")
    if all(name.startswith(f"{FOLDER}/") for name in store.manifest(entry).files):
        return _copy_files(store, entry, out, args)
    if out.suffix not in _FORMATS:
        raise ConfigError(
            f"The name of {out} does not say in which format to write",
            evidence=f"its ending is {out.suffix!r}; nothing was written",
            remedy=f"end it in {' or '.join(_FORMATS)}",
        )
    # torch takes seconds to import: only who exports pays for it
    from slurm_resilience.training.exporting import export as export_weights

    done = export_weights(store, entry, out, model=args.model)
    if args.json:
        return print_json(
            {"name": entry.name, "step": entry.step, "path": str(out), "model": done.model, "tensors": done.tensors,
             "bytes": done.bytes, "left_out": list(done.left_out)}
        )  # fmt: skip
    say(
        f"{entry.name}: {done.tensors} tensors of {done.model!r}, {done.bytes / 1e6:.1f} MB, every digest checked, are in {out}"
    )
    if done.left_out:
        say(f"not in it, since they are no tensors: {', '.join(done.left_out)}")
    return ExitCode.OK


def _copy_files(store: CheckpointStore, entry: Entry, out: Path, args: argparse.Namespace) -> int:
    """What a framework has written itself is nobody's to convert."""
    problems = read_again(store, entry, THREADS, quiet=args.json)
    if problems:
        raise CorruptCheckpoint(f"{entry.name} is not exported: it is bad", evidence=in_short(problems))
    held = sorted((store.path(entry) / FOLDER).iterdir())
    if len(held) == 1 and held[0].is_file():
        _copy_whole(held[0], out)
    else:
        shutil.copytree(store.path(entry) / FOLDER, out)
    if args.json:
        return print_json({"name": entry.name, "step": entry.step, "path": str(out), "files": len(held), "bytes": entry.bytes})
    say(f"{entry.name}: the framework's own files, {entry.bytes / 1e6:.1f} MB, every digest checked, are in {out}")
    return ExitCode.OK


def _copy_whole(source: Path, out: Path) -> None:
    """Copy a file so that, on a full disk too, nobody sees half of it, nor loses what was there."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(out.absolute().parent)
