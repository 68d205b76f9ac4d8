"""Keeps the checkpoint file that a script writes on its own: puts the newest whole one in place, copies each new one away.

Only rank 0 does anything; the others wait until the file is in place.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
import zipfile
from pathlib import Path

from slurm_resilience._atomic import fsync_dir, write_atomic
from slurm_resilience._clock import boot_id
from slurm_resilience.checkpoint import payload, verify
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.retention import Retention
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.errors import CheckpointError, Fenced, NoValidCheckpoint
from slurm_resilience.integrations.own_file import VARIABLE, ready
from slurm_resilience.progress.contract import RankContract
from slurm_resilience.progress.facts import FactSender

FOLDER = "checkpoint-file"
_LOOK_EVERY_S = 0.25
_READY = ".ready"

log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]  # inode, bytes, time of the last write in ns


class FileKeeper:
    """One attempt's hold on the script's file.  ``path`` is where the script reads and writes it.

    The number of a save stands where a ``Run`` has its step: how far a script has got, nobody knows but itself.
    """

    def __init__(self, contract: RankContract, name: str, *, rank: int, world: int) -> None:
        self._contract, self._rank, self._world = contract, rank, world
        self._home = Path(contract.run_dir) / FOLDER
        self._folder = self._home / f"attempt-{contract.attempt}"
        self.path = self._folder / name
        self._namesake = Path.cwd() / name  # where a script saves that was never told the path
        self._facts = FactSender(contract.facts, attempt=contract.attempt, rank=rank)
        self._seen: _Stamp | None = None
        self._refused: _Stamp | None = None
        self._unheard, self._told = _stamp(self._namesake), False
        self._save = 0
        self._resumed: Entry | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        if rank == 0:
            settings = contract.settings.get("checkpoint") or {}
            default = Retention()
            self._store = CheckpointStore.open(
                contract.checkpoints,
                attempt=contract.attempt,
                job_id=contract.job_id,
                restart_count=contract.restart_count,
                node=contract.node,
                boot_id=boot_id(),
                retention=Retention(
                    keep_last=settings.get("keep_last", default.keep_last),
                    every_steps=settings.get("keep_every_steps"),
                    every_hours=settings.get("keep_every_hours"),
                ),
                trusted_group=settings.get("trusted_group"),
            )

    def begin(self) -> bool:
        """Have the file in place; whether there is one to go on from.  All ranks call it.

        Raises :class:`NoValidCheckpoint` when there are checkpoints and none is whole: the run does not begin again by itself.
        """
        began = time.monotonic()
        if self._rank == 0:
            self._put_in_place()
            self._thread = threading.Thread(target=self._watch, name="checkpoint-file", daemon=True)
            self._thread.start()
        while (resumes := ready(self._folder / _READY)) is None:
            time.sleep(0.02)  # rank 0 says it, or dies, and then the agent ends us too
        seconds = round(time.monotonic() - began, 6)
        if resumes:
            told = json.loads((self._folder / _READY).read_text(encoding="ascii"))
            self._facts.send(
                "resumed", step=told["save"], checkpoint=told["name"], seconds=seconds, world=self._world, tier="shared"
            )
        else:
            self._facts.send("started_fresh")
        return resumes

    def close(self) -> None:
        """The script has ended: keep what it wrote last.  Nothing to do on other ranks than 0."""
        if self._thread is None:
            return
        self._end.set()
        self._thread.join()
        self._look()

    # -- at the start ---------------------------------------------------------------------------------------------

    def _put_in_place(self) -> None:
        self._store.fence()
        self._store.excuse(self._contract.plan.get("excused_attempts", ()))
        self._folder.mkdir(parents=True, exist_ok=True)
        entry = self._newest()
        if entry is not None:
            self._store.mark_attempted(entry)
            (source,) = (self._store.path(entry) / payload.FOLDER).iterdir()
            _copy(source, self.path)
            self._save, self._resumed = entry.step, entry
            self._seen = _stamp(self.path)
        for old in self._home.glob("attempt-*"):
            if old != self._folder:
                shutil.rmtree(old, ignore_errors=True)
        word = {"resumes": entry is not None, "save": self._save, "name": entry.name if entry is not None else ""}
        write_atomic(self._folder / _READY, json.dumps(word).encode())

    def _newest(self) -> Entry | None:
        rejected = []
        for entry in self._store.candidates():
            found = verify.verify(self._store.path(entry), entry)
            if not found:
                return entry
            reason = str(found[0])
            rejected.append(f"{entry.name}: {reason}")
            log.error("checkpoint %s is not to be trusted: %s; the next older one is tried", entry.name, reason)
            self._store.quarantine(entry, reason, f"attempt {self._contract.attempt} of {self._contract.run_id}")
            self._facts.send("checkpoint_quarantined", step=entry.step, name=entry.name, reason=reason)
        condemned = rejected or [f"{entry.name}: {entry.reason}" for entry in self._store.entries()]
        if condemned:
            raise NoValidCheckpoint(
                f"None of the {len(condemned)} checkpoints in {self._store.root} can be trusted, so the run does not go on",
                evidence="; ".join(condemned[:4]),
                remedy="slurm-resilience checkpoints release, if this is a false alarm; otherwise start a new run folder",
            )
        return None

    # -- while the script runs --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._end.wait(_LOOK_EVERY_S):
            try:
                self._look()
            except Fenced:
                return  # a newer attempt has the run; the agent ends this one

    def _look(self) -> None:
        """Commit a copy of the file when it is new and whole."""
        stamp = _stamp(self.path)
        if stamp is None and not self._save:
            self._warn_of_namesake()
        if stamp is None or stamp in (self._seen, self._refused) or not stamp[1] or _being_written(self.path):
            return
        began = time.monotonic()
        try:
            entry = self._commit(stamp)
        except Fenced:
            raise
        except (CheckpointError, OSError) as error:
            self._refused = stamp
            log.error("the file %s was not kept: %s", self.path.name, error)
            self._facts.send("checkpoint_failed", step=self._save + 1, error=str(error))
            return
        if entry is None:
            return
        self._seen, self._save = stamp, entry.step
        seconds = round(time.monotonic() - began, 6)
        self._facts.send(
            "checkpoint_committed", step=entry.step, name=entry.name, bytes=entry.bytes, seconds=seconds, stall_s=0.0
        )
        if self._resumed is not None:  # a script that saves again has made use of what it was given
            self._store.mark_verified(self._resumed, f"attempt {self._contract.attempt}: it saved again")
            self._resumed = None

    def _warn_of_namesake(self) -> None:
        """Say once that the script saves elsewhere, and nothing is kept: its path is fixed in it, as in PyTorch's tutorial."""
        stamp = _stamp(self._namesake)
        if stamp in (None, self._unheard) or self._told:
            return
        self._told = True
        error = str(
            CheckpointError(
                f"The script saves into {self._namesake}, which is not the file that is kept for it",
                evidence=f"that file is new and {self.path} is not there",
                remedy=f"give the script {{checkpoint}} as its path, or have it save into os.environ[{VARIABLE!r}]",
            )
        )
        log.error("%s", error)
        self._facts.send("checkpoint_failed", step=1, error=error)

    def _commit(self, stamp: _Stamp) -> Entry | None:
        draft = self._store.begin(self._save + 1, expected_bytes=stamp[1])
        try:
            (draft.path / payload.FOLDER).mkdir()
            copy = draft.path / payload.FOLDER / self.path.name
            _copy(self.path, copy)
            if _stamp(self.path) != stamp or _being_written(self.path):
                self._store.abandon(draft)
                return None  # written again meanwhile: the next look takes it
            _refuse_half(copy, self.path)
            files, items = payload.take(draft.path)
            return self._store.commit(draft, world=self._world, files=files, items=items)
        except BaseException:
            self._store.abandon(draft)
            raise


def _stamp(path: Path) -> _Stamp | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


def _being_written(path: Path) -> bool:
    """This process has the file open for writing.  Source: proc(5), fd and fdinfo: flags are octal, the last bits the mode."""
    try:
        wanted = path.stat()
    except OSError:
        return False
    for name in os.listdir("/proc/self/fd"):
        try:
            there = os.stat(f"/proc/self/fd/{name}")
            if (there.st_dev, there.st_ino) != (wanted.st_dev, wanted.st_ino):
                continue
            lines = Path(f"/proc/self/fdinfo/{name}").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), 0)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            return True
    return False


def _refuse_half(copy: Path, original: Path) -> None:
    """torch.save() writes an archive whose list of contents comes last: without it the file was cut off."""
    with open(copy, "rb") as file:
        is_archive = file.read(4) == b"PK\x03\x04"
    if is_archive and not zipfile.is_zipfile(copy):
        raise CheckpointError(
            f"{original} is only a part of a checkpoint", evidence="it begins as an archive of torch.save() and has no end"
        )


def _copy(source: Path, target: Path) -> None:
    """A durable copy: the file first, then its name."""
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    fsync_dir(target.parent)
