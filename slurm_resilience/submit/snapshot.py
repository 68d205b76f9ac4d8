"""The code as it is when the job is submitted, so that a later attempt runs what the first one ran.

What git knows of the folder (tracked files as they are now, and new ones that it does not ignore) is copied into the run's
folder; without git, everything but environments, caches and hidden folders.  What is left out, such as data that git
ignores, is linked: relative paths of the program work as they did.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience._atomic import write_json_atomic
from slurm_resilience.errors import ConfigError
from slurm_resilience.runtime.command import parse_python

FILE_NAME = "snapshot.json"
VERSION = 1
MOST_BYTES = 256 << 20
MOST_FILES = 20_000
_RUNS = frozenset({"resilience-runs", "resilience-run"})
_NEVER = _RUNS | {"__pycache__", "node_modules", "wandb", "mlruns"}


@dataclass(frozen=True)
class Source:
    """What is to be copied: ``root``, the git work tree or the folder itself; ``at``, where in it the program starts.

    ``paths``: places of ``root`` from which modules are imported.  All relative to ``root`` but itself.
    """

    root: Path
    at: Path
    paths: tuple[Path, ...]
    git: bool

    @classmethod
    def of(cls, folder: str | os.PathLike[str], *, search: Sequence[str] | None = None) -> Source:
        """The source that holds ``folder``.  Raises :class:`ConfigError` when there is no such folder."""
        here = Path(folder).expanduser().resolve()
        if not here.is_dir():
            raise ConfigError(f"There is no folder {here} to take a snapshot of", remedy="give the folder that holds your code")
        top = _git(here, "rev-parse", "--show-toplevel")
        root = Path(top).resolve() if top else here
        entries = (Path(entry).resolve() for entry in (sys.path if search is None else search) if entry)
        paths = tuple(dict.fromkeys(entry.relative_to(root) for entry in entries if entry.is_relative_to(root)))
        return cls(root, here.relative_to(root), paths, bool(top))

    def lines(self, snapshot: Path) -> list[str]:
        """Shell lines that have the program start in the snapshot and import from it."""
        where = [str(snapshot / path) for path in self.paths if path != self.at]
        out = [f"cd -- {shlex.quote(str(snapshot / self.at))}"]
        if where:
            out.append(f"export PYTHONPATH={shlex.quote(':'.join(where))}" + '"${PYTHONPATH:+:$PYTHONPATH}"')
        return out

    def command(self, words: Sequence[str], snapshot: Path) -> tuple[str, ...]:
        """The same command with the script of the snapshot, where it names one by its full path."""
        python = parse_python(words)
        if python is None or python.form != "script" or not os.path.isabs(python.target):
            return tuple(words)
        script = Path(python.target).resolve()
        if not script.is_relative_to(self.root):
            return tuple(words)
        return tuple(str(snapshot / script.relative_to(self.root)) if word == python.target else word for word in words)


def next_place(run_dir: Path) -> Path:
    """Where the next snapshot of this run goes: ``code``, then ``code-2`` for one that is submitted again with newer code."""
    number, place = 1, run_dir / "code"
    while os.path.lexists(place):
        number += 1
        place = run_dir / f"code-{number}"
    return place


def take(source: Source, target: Path, *, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES) -> None:
    """Copy the code to ``target``, which is made.  Raises :class:`ConfigError` for too much of it, before anything is copied.

    Copied files are read-only.  Links stay links.
    """
    run_dir = target.parent
    files = [path for path in _files(source) if not _RUNS & {*path.parts} and not (source.root / path).is_relative_to(run_dir)]
    sizes = {path: _size(source.root / path) for path in files}
    _check(source, sizes, most_bytes, most_files)
    try:
        for path in files:
            _copy(source.root / path, target / path)
        (target / source.at).mkdir(parents=True, exist_ok=True)
        _link_the_rest(source.root, target, {target, target.parent})
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ConfigError(
            f"No snapshot of {source.root} could be taken", evidence=f"{type(error).__name__}: {error}"
        ) from error
    about = {"v": VERSION, "source": str(source.root), "files": len(files), "bytes": sum(sizes.values())}
    if source.git:
        about |= {
            "commit": _git(source.root, "rev-parse", "HEAD") or None,
            "changed": bool(_git(source.root, "status", "--porcelain", "--untracked-files=normal")),
        }
    write_json_atomic(target.parent / f"{target.name}.json", about)


def _files(source: Source) -> list[Path]:
    if source.git:
        return _git_files(source.root)
    out: list[Path] = []
    for place, folders, names in os.walk(source.root):
        here = Path(place)
        folders[:] = [name for name in sorted(folders) if not _left_out(here / name)]
        links = [name for name in folders if (here / name).is_symlink()]
        out += [(here / name).relative_to(source.root) for name in (*links, *sorted(names)) if not name.startswith(".")]
        if len(out) > MOST_FILES:
            break
    return out


def _git_files(root: Path) -> list[Path]:
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    out = []
    for name in dict.fromkeys(listed.split("\0")):
        path = root / name
        if not name or not os.path.lexists(path):
            continue  # removed, and not yet committed
        if path.is_dir() and not path.is_symlink():  # a submodule, or a work tree of its own
            out += [Path(name) / inner for inner in _git_files(path)] if (path / ".git").exists() else []
        else:
            out.append(Path(name))
    return out


def _left_out(folder: Path) -> bool:
    name = folder.name
    return name.startswith(".") or name in _NEVER or (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()


def _check(source: Source, sizes: dict[Path, int], most_bytes: int, most_files: int) -> None:
    total = sum(sizes.values())
    if total <= most_bytes and 0 < len(sizes) <= most_files:
        return
    if not sizes:
        raise ConfigError(
            f"There is no code in {source.root} to take a snapshot of",
            evidence="git ignores all of it" if source.git else "it is empty, or all of it is hidden",
        )
    heaviest: dict[str, int] = {}
    for path, size in sizes.items():
        heaviest[path.parts[0]] = heaviest.get(path.parts[0], 0) + size
    worst = sorted(heaviest.items(), key=lambda item: -item[1])[:3]
    raise ConfigError(
        f"{source.root} is too much for a snapshot of code",
        evidence=f"{len(sizes)} files, {total >> 20} MiB; at most {most_files} and {most_bytes >> 20} MiB. The heaviest: "
        + ", ".join(f"{name} ({size >> 20} MiB)" for name, size in worst),
        remedy="name what is no code in .gitignore, or give the folder of the code alone (snapshot=DIR); what is left out is "
        "linked, so the program finds it all the same",
    )


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
        return
    shutil.copy2(source, target)
    target.chmod(stat.S_IMODE(source.stat().st_mode) & ~0o222)


def _link_the_rest(source: Path, target: Path, never: set[Path]) -> None:
    """What was not copied stands as a link in its place, so that relative paths of the program still lead to it."""
    for entry in os.scandir(source):
        there = target / entry.name
        if entry.name == ".git" or entry.name == "__pycache__" or Path(entry.path) in never:
            continue
        if not os.path.lexists(there):
            there.symlink_to(entry.path)
        elif entry.is_dir(follow_symlinks=False) and there.is_dir() and not there.is_symlink():
            _link_the_rest(Path(entry.path), there, never)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_size
    return 0


def _git(folder: Path, *words: str) -> str:
    """What git says; "" where there is no git, or no work tree."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, encoding="utf-8", errors="surrogateescape", timeout=60,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.rstrip("\n") if done.returncode == 0 else ""
