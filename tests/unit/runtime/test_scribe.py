"""What the supervisor writes, when the file system does not play along."""

from __future__ import annotations

import errno
import json
import queue
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.observe.events import EventWriter, read_events
from slurm_resilience.runtime import forgiveness
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.inputs import AttemptWritten, Forgiven, Record, Superseded, WriteAttempt, WriteLive, WriteStatus
from slurm_resilience.runtime.run_folder import RunFolder, RunStatus
from slurm_resilience.runtime.scribe import Scribe

PATIENCE_S = 60.0
ADDRESS = SupervisorAddress(3, "127.0.0.1", 1, "t", 1, "b", "7", 0)


class FullDisk(EventWriter):
    """An event file on a disk that is full while ``full`` is set."""

    full = False
    refused = 0

    def write(self, event: str, /, **fields: Any) -> dict[str, Any]:
        if self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(event, **fields)


class Desk:
    def __init__(self, path: Path, shown: list[str] | None = None) -> None:
        self.folder = RunFolder(path)
        self.folder.prepare()
        self.disk = FullDisk(path, restart=0)
        self.answers: queue.Queue[Any] = queue.Queue()
        self.shown: list[str] = [] if shown is None else shown
        self.scribe = Scribe(self.folder, self.disk, address=ADDRESS, answer=self.answers.put, show=self.shown.append)
        self.scribe.start()

    def announce(self, epoch: int) -> None:
        SupervisorAddress(epoch, "127.0.0.1", 1, "t", 1, "b", "7", 0).write(self.folder.path)

    @property
    def events(self) -> list[str]:
        return [event["event"] for event in read_events(self.folder.path)]


def record(name: str) -> Record:
    return Record(name, {}, 1.0, 1)


def test_outputs_are_done_in_order(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.announce(3)
    desk.scribe.put(record("a"))
    desk.scribe.put(WriteAttempt(5))
    desk.scribe.put(record("b"))
    desk.scribe.put(WriteStatus(RunStatus("running")))
    desk.scribe.say("a line")
    assert desk.scribe.flush(within_s=PATIENCE_S)
    assert desk.events == ["a", "b"]
    assert desk.answers.get_nowait() == AttemptWritten(5)
    assert desk.folder.attempt() == 5
    assert desk.folder.status() == RunStatus("running")
    assert desk.shown == ["a line"]


def test_events_that_find_no_room_are_kept_in_order_and_written_later(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.scribe.put(record("a"))
    assert desk.scribe.flush(within_s=PATIENCE_S)
    desk.disk.full = True
    desk.scribe.put(record("b"))
    desk.scribe.put(record("c"))
    deadline = time.monotonic() + PATIENCE_S
    while not desk.shown:
        assert time.monotonic() < deadline
    assert "No space left" in desk.shown[0]
    assert desk.events == ["a"]
    desk.disk.full = False
    desk.scribe.put(record("d"))
    while desk.events != ["a", "b", "c", "d"]:
        assert time.monotonic() < deadline, desk.events


def test_a_folder_that_is_gone_is_not_said_to_be_back_for_an_event_in_a_file_that_was_open(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run")
    desk.announce(3)
    desk.scribe.put(record("a"))
    assert desk.scribe.flush(within_s=PATIENCE_S)
    moved = desk.folder.path.rename(tmp_path / "moved")
    for number in range(3):
        desk.scribe.put(WriteStatus(RunStatus("running", cause=f"state {number}")))
        desk.scribe.put(record("b"))
    deadline = time.monotonic() + PATIENCE_S
    while [event["event"] for event in read_events(moved)] != ["a", "b", "b", "b"]:
        assert time.monotonic() < deadline
    assert desk.scribe.flush(within_s=PATIENCE_S)
    assert len([line for line in desk.shown if "cannot write into" in line]) == 1
    assert not [line for line in desk.shown if "can be written again" in line]
    moved.rename(desk.folder.path)
    while not (desk.shown and "can be written again" in desk.shown[-1]):
        assert time.monotonic() < deadline, desk.shown
        time.sleep(0.05)
    assert desk.folder.status() == RunStatus("running", cause="state 2")


def test_a_state_that_could_not_be_written_does_not_come_after_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    write, first = desk.folder.write_status, RunStatus("running")
    tried: list[RunStatus] = []

    def write_status(status: RunStatus) -> None:
        tried.append(status)
        if len(tried) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(status)

    monkeypatch.setattr(desk.folder, "write_status", write_status)
    desk.scribe.put(WriteStatus(first))
    desk.scribe.put(WriteStatus(RunStatus("failed")))
    assert desk.scribe.flush(within_s=PATIENCE_S)
    assert tried == [first, first, RunStatus("failed")]
    assert desk.folder.status() == RunStatus("failed")


def test_a_live_view_that_finds_no_room_is_forgotten(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.scribe.put(WriteLive({"t": 1.0}))
    assert desk.scribe.flush(within_s=PATIENCE_S)
    assert json.loads((desk.folder.path / "live.json").read_text()) == {"t": 1.0}
    (desk.folder.path / "live.json").unlink()
    (desk.folder.path / "live.json").mkdir()  # it cannot be replaced
    desk.scribe.put(WriteLive({"t": 2.0}))
    desk.scribe.put(record("a"))
    assert desk.scribe.flush(within_s=PATIENCE_S)
    assert desk.events == ["a"]


def test_one_that_has_been_superseded_writes_no_attempt_no_event_no_state(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.announce(4)
    desk.scribe.put(record("a"))
    desk.scribe.put(WriteAttempt(9))
    desk.scribe.put(record("b"))
    desk.scribe.put(WriteStatus(RunStatus("failed")))
    assert desk.scribe.flush(within_s=PATIENCE_S)
    assert desk.answers.get_nowait() == Superseded(4)
    assert desk.shown == ["supervisor 4 of this run has taken it over: this one, 3, steps back"]
    assert desk.answers.empty()
    assert desk.folder.attempt() == 0
    assert desk.events == []
    assert desk.folder.status() is None


class NobodyReads(list[str]):
    """Standard output whose reader has gone, or that lies on the full disk itself."""

    def append(self, line: str) -> None:
        raise OSError(errno.EPIPE, "Broken pipe")


def test_what_is_written_does_not_depend_on_what_can_be_shown(tmp_path: Path) -> None:
    desk = Desk(tmp_path, shown=NobodyReads())
    desk.announce(3)
    desk.scribe.put(Record("allocation_started", {"nodes": ["n1"], "job_id": "7"}, 1.0, 0))
    desk.disk.full = True
    desk.scribe.put(record("a"))
    desk.scribe.put(WriteAttempt(5))
    while not desk.disk.refused:
        assert desk.scribe.is_alive()
    desk.disk.full = False
    assert desk.answers.get(timeout=PATIENCE_S) == AttemptWritten(5)
    desk.scribe.put(record("b"))
    deadline = time.monotonic() + PATIENCE_S
    while desk.events != ["allocation_started", "a", "b"]:
        assert time.monotonic() < deadline, desk.events
    assert desk.scribe.is_alive()


def test_a_wish_in_the_run_folder_is_heard_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.announce(3)
    wish = forgiveness.ask(tmp_path, "n2")
    assert desk.answers.get(timeout=PATIENCE_S) == Forgiven("n2")
    assert not wish.exists()
    assert forgiveness.heard(tmp_path) == []
