"""Random damage to a whole root, as a user without privileges meets it: no verb ends in a traceback, what is chosen is whole,
and nothing good is thrown away."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.checkpoint import marks, names, sealed
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.cli import main
from slurm_resilience.errors import ResilienceError
from tests.unit.checkpoint.drafts import FILE, commit, opened

NOBODY = 65534
PARTS = (names.MANIFEST, names.METADATA, FILE)
ODD_TEXTS = ["\x1b[2J", "\ud800", "\u202egnp", "x" * 5000, "a\nb", "", "²", "\0"]
ODD_VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 10**30, "", "1", [], {}, [[]], {"v": 1}, {"v": "1", "entries": 3}, {"v": 1, "entries": [[]]},
    {"begun": 3}, {"begun": [{}, "x"], "excused": [[]]}, {"reason": ["\x1b"]}, {"run_id": 7, "inode": "x"},
    {"attempt": "9", "pid": 10**30},
]  # fmt: skip


class Root:
    """A root of six checkpoints, what each of them was, and how to hurt it."""

    def __init__(self, path: Path, dice: random.Random, done: list[str]) -> None:
        self.path, self.dice, self.done = path, dice, done
        self.was: dict[str, dict[str, bytes]] = {}
        for attempt in (1, 2):
            store = opened(path, attempt=attempt, run_id="alpha")
            for step in (10, 20, 30):
                entry = commit(store, 100 * attempt + step, dice.randbytes(200), metrics={"loss": float(step)})
                self.was[entry.name] = {part: (path / entry.name / part).read_bytes() for part in PARTS}
                if dice.random() < 0.3:
                    store.mark_verified(entry, by="a run")
                if dice.random() < 0.2:
                    store.pin(entry)

    def whole(self, name: str) -> bool:
        try:
            return all((self.path / name / part).read_bytes() == raw for part, raw in self.was[name].items())
        except (OSError, KeyError):
            return False

    def good(self) -> list[str]:
        """Whole, not quarantined by a mark, holding no foreign file; newest first."""
        ours = {*PARTS, marks.VERIFIED, marks.PINNED, marks.ATTEMPTED, marks.DOUBTED}
        found = []
        for name in sorted(self.was, key=lambda name: (names.parse(name) or (0, 0, ""))[1::-1], reverse=True):
            with contextlib.suppress(OSError):
                if os.path.islink(self.path / name):
                    continue
                files = {file for _, _, listed in os.walk(self.path / name) for file in listed}
                if self.whole(name) and files <= ours:
                    found.append(name)
        return found

    def hurt(self) -> None:
        every = [path for path in self.path.rglob("*") if not os.path.islink(path)]
        path = self.dice.choice([self.path / names.HEAD, *every] if self.dice.random() < 0.5 else every)
        how = self.dice.choice([name for name in dir(self) if name.startswith("_do_")])
        self.done.append(f"{how[4:]} {path.relative_to(self.path)}")
        with contextlib.suppress(OSError, ValueError):
            getattr(self, how)(path)

    def _do_remove(self, path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _do_truncate(self, path: Path) -> None:
        os.truncate(path, self.dice.randrange(path.stat().st_size + 1))

    def _do_zero(self, path: Path) -> None:
        path.write_bytes(bytes(path.stat().st_size))

    def _do_garble(self, path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[self.dice.randrange(len(raw))] ^= 1 << self.dice.randrange(8)
        path.write_bytes(raw)

    def _do_become_a_directory(self, path: Path) -> None:
        self._do_remove(path)
        path.mkdir()
        (path / "kept").write_bytes(b"somebody's")

    def _do_become_a_file(self, path: Path) -> None:
        self._do_remove(path)
        path.write_bytes(b"not what it was")

    def _do_become_a_link(self, path: Path) -> None:
        self._do_remove(path)
        path.symlink_to(self.dice.choice([path.name, "nowhere", "/", "/etc/passwd"]))

    def _do_odd_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.dice.choice(ODD_VALUES)))

    def _do_odd_and_sealed(self, path: Path) -> None:
        path.write_bytes(sealed.seal(self.dice.choice(ODD_VALUES)))

    def _do_nest(self, path: Path) -> None:
        path.write_bytes(b"[" * 100_000)

    def _do_swap(self, path: Path) -> None:
        other = self.dice.choice([other for other in self.path.rglob("*") if os.path.isdir(other) == os.path.isdir(path)])
        spare = self.path / "spare"
        os.rename(path, spare)
        os.rename(other, path)
        os.rename(spare, other)

    def _do_copy(self, path: Path) -> None:
        target = self.path / names.new_name(self.dice.randrange(400), self.dice.randrange(1, 4))
        shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)

    def _do_forbid(self, path: Path) -> None:
        path.chmod(self.dice.choice([0, 0o200, 0o400, 0o500]))

    def _do_odd_mark(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        mark = self.dice.choice([marks.QUARANTINED, marks.VERIFIED, marks.ATTEMPTED, marks.PINNED, marks.DOUBTED])
        (folder / mark).write_text(json.dumps({"reason": self.dice.choice(ODD_TEXTS), "by": self.dice.choice(ODD_TEXTS)}))

    def _do_odd_name(self, path: Path) -> None:
        name = self.dice.choice(["step-99999999999999999999-a00001-00000000", "a99999999", "\udcff", "\x1b[2J", "step-"])
        (path if path.is_dir() else path.parent).joinpath(name).mkdir()


def verbs(dice: random.Random) -> list[list[str]]:
    which = dice.choice(["latest", "130", "230", "step-", "99", "\x1b", "²"])
    some: list[list[str]] = [
        ["list"], ["list", "--json"], ["show", which], ["show", "--items"], ["verify"], ["verify", "--all", "--json"],
        ["rebuild", "--dry-run"], ["rebuild"], ["prune", "--keep-last", "1", "--dry-run"], ["prune", "--keep-last", "1"],
        ["prune", "--keep-last", "2", "--best", "loss"], ["pin", which], ["pin", which, "--off"], ["release", which],
        ["verify", "--all", "--quarantine"],
    ]  # fmt: skip
    return dice.sample(some, 6)


def torment(root: Root) -> None:
    """Raises AssertionError, with all that was done, at the first thing that must not be."""
    for _ in range(root.dice.randint(1, 4)):
        root.hurt()
    for verb in verbs(root.dice):
        good = root.good()
        out, err = io.StringIO(), io.StringIO()
        root.done.append(" ".join(verb))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["checkpoints", verb[0], str(root.path), *verb[1:]])
        assert isinstance(code, int)
        said = out.getvalue()
        said.encode()
        assert all(one.isprintable() or one == "\n" for one in said), said
        if verb[0] == "prune":
            kept = root.good()
            assert not good or good[0] in kept, "prune took the newest good one"
        else:
            assert [name for name in good if not root.whole(name)] == [], "a verb that removes nothing took a good one"
        with contextlib.suppress(OSError, ResilienceError):
            latest = CheckpointStore.open(root.path).latest()
            if latest is not None and latest.name in root.was:
                assert (root.path / latest.name / names.MANIFEST).read_bytes() == root.was[latest.name][names.MANIFEST]
            if latest is not None and verb == ["verify", "--all", "--quarantine"] and code in (0, 84):
                assert latest.name not in root.was or root.whole(latest.name), "the latest is not whole, and was verified"
    good = root.good()
    with contextlib.suppress(OSError, ResilienceError):
        store = opened(root.path, attempt=9, run_id="alpha")
        entry = commit(store, 1)
        assert CheckpointStore.open(root.path).latest() == entry, "a new checkpoint is not the latest"
    assert [name for name in good if not root.whole(name)] == [], "a new attempt took a good one"


def in_a_child(seeds: range, folder: str, told: Any) -> None:
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    for seed in seeds:
        done: list[str] = []
        try:
            torment(Root(Path(folder) / str(seed), random.Random(seed), done))
        except BaseException:  # a SystemExit would be a finding too
            told.put(f"seed {seed}, {done}:\n{traceback.format_exc()}")
    told.put("")


@pytest.fixture
def open_folder() -> Iterator[str]:
    """A folder that also nobody may reach, in memory where there is some: it is about odd bytes, not about the disk."""
    folder = tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp")
    os.chmod(folder, 0o777)
    yield folder
    remove_all(folder)


def remove_all(folder: str) -> None:
    for place, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                if not os.path.islink(path):  # chmod follows links, and one of them leads to /
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(8), id="some"), pytest.param(range(8, 500), marks=pytest.mark.long, id="very many")]
)
def test_no_damage_is_too_odd(seeds: range, open_folder: str) -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    child = context.Process(target=in_a_child, args=(seeds, open_folder, told))
    child.start()
    found = []
    while word := told.get(timeout=3000):
        found.append(word)
    child.join(timeout=60)
    assert not found, f"{len(found)} of {len(seeds)}:\n" + "\n".join(found[:6])
