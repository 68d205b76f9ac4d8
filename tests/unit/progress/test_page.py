"""The shared page: both ends agree, from two processes, and foreign or newer pages are refused."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_resilience.errors import FormatError
from slurm_resilience.progress.page import PAGE_BYTES, VERSION, Orders, PageReader, PageWriter, Phase


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "page"


def test_a_new_page_says_that_nothing_was_reported_yet(path: Path) -> None:
    reader = PageReader(path)
    seen = reader.read()
    assert (seen.step, seen.beats, seen.phase, seen.done) == (-1, 0, Phase.INIT, False)
    assert 0 <= seen.age_s < 60
    assert path.stat().st_size == PAGE_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert PageWriter(path).orders() == Orders(False, 0, None, "")


def test_beats_phases_and_the_end_cross(path: Path) -> None:
    reader = PageReader(path)
    writer = PageWriter(path)
    writer.beat(7)
    assert (reader.read().step, reader.read().beats) == (7, 1)
    before = writer.enter(Phase.CHECKPOINT)
    assert before is Phase.INIT
    time.sleep(0.05)
    writer.beat(8)
    seen = reader.read()
    assert (seen.step, seen.beats, seen.phase) == (8, 3, Phase.CHECKPOINT)
    assert seen.phase_age_s - seen.age_s >= 0.05, "the phase is older than the beat"
    assert writer.enter(before) is Phase.CHECKPOINT
    assert reader.read().phase is Phase.INIT
    assert not reader.read().done
    writer.done()
    assert reader.read().done


def test_orders_cross_with_deadline_and_cause(path: Path) -> None:
    reader = PageReader(path)
    writer = PageWriter(path)
    reader.order(save=1, cause="manual")
    assert writer.orders() == Orders(False, 1, None, "manual")
    reader.order(stop=True, save=2, deadline=1234.5, cause="preemption")
    assert writer.orders() == Orders(True, 2, 1234.5, "preemption")
    reader.order(cause="x" * 100)
    assert writer.orders() == Orders(False, 0, None, "x" * 31)


def test_it_is_seen_from_another_process_at_once(path: Path) -> None:
    reader = PageReader(path)
    code = (
        "import sys; from slurm_resilience.progress.page import PageWriter, Phase\n"
        f"page = PageWriter({str(path)!r})\n"
        "for line in sys.stdin:\n    page.beat(int(line)); print(page.orders().save, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    for step in (1, 2, 10**15):
        reader.order(save=step)
        child.stdin.write(f"{step}\n")
        child.stdin.flush()
        assert child.stdout.readline() == f"{step}\n"
        assert reader.read().step == step
    child.stdin.close()
    assert child.wait(60) == 0
    assert reader.read().step == 10**15  # a page outlives its rank


def test_a_writer_that_starts_again_goes_on_from_the_page(path: Path) -> None:
    reader = PageReader(path)
    first = PageWriter(path)
    first.enter(Phase.DATA)
    first.beat(3)
    second = PageWriter(path)
    second.beat(4)
    seen = reader.read()
    assert (seen.step, seen.beats, seen.phase) == (4, 3, Phase.DATA)


def test_a_page_is_made_once_and_removed(path: Path) -> None:
    reader = PageReader(path)
    with pytest.raises(FileExistsError):
        PageReader(path)
    reader.close()
    assert not path.exists()
    reader_again = PageReader(path)
    path.unlink()
    reader_again.close()  # somebody was faster


@pytest.mark.parametrize("start", [b"\0" * 8, b"SRPX" + struct.pack("<I", 1), b"SRPG" + struct.pack("<I", VERSION + 1)])
def test_foreign_and_newer_pages_are_refused_with_a_remedy(start: bytes, path: Path) -> None:
    path.write_bytes(start.ljust(PAGE_BYTES, b"\0"))
    with pytest.raises(FormatError, match="same release"):
        PageWriter(path)


def test_a_phase_that_we_do_not_know_is_the_users(path: Path) -> None:
    reader = PageReader(path)
    writer = PageWriter(path)
    writer._phase = 99
    writer.beat(1)
    assert reader.read().phase is Phase.USER


def test_the_layout_is_what_the_launcher_has_copied(path: Path) -> None:
    """rank_process.py and main_module.py may import nothing of ours, and know two offsets by heart."""
    from slurm_resilience.runtime import main_module, rank_process

    reader = PageReader(path)
    PageWriter(path).beat(42)
    reader.order(stop=True)
    raw = path.read_bytes()
    assert struct.unpack_from("<q", raw, main_module._STEP_AT) == (42,)
    assert struct.unpack_from("<q", raw, rank_process._STOP_AT) == (1,)
    assert rank_process.is_ordered_to_stop(str(path))
    reader.order(stop=False)
    assert not rank_process.is_ordered_to_stop(str(path))


def test_a_beat_makes_no_system_call(path: Path) -> None:
    """By its cost: a system call alone takes longer than the limit on most machines; the best of many rounds counts."""
    PageReader(path)
    beat = PageWriter(path).beat
    best = 1.0
    for _ in range(50):
        began = time.perf_counter()
        for step in range(1000):
            beat(step)
        best = min(best, (time.perf_counter() - began) / 1000)
    assert best < 2e-6, f"{best * 1e6:.2f} us"


def test_two_ends_in_a_fork_share_one_page(path: Path) -> None:
    reader = PageReader(path)
    writer = PageWriter(path)
    pid = os.fork()
    if pid == 0:
        writer.beat(5)
        os._exit(0)
    os.waitpid(pid, 0)
    assert reader.read().step == 5
