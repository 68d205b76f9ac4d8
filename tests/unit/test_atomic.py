"""No reader and no crash ever sees half a file."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slurm_resilience._atomic import read_json, write_atomic, write_json_atomic, write_output


def test_content_and_mode_arrive_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "supervisor.json"
    write_json_atomic(target, {"token": "ü"}, mode=0o600)
    assert read_json(target) == {"token": "ü"}
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    write_atomic(target, b"new")
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["supervisor.json"]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_rubbish(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    write_json_atomic(target, {"step": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(target, {"loss": float("nan")})
    os.mkdir(tmp_path / "folder")
    with pytest.raises(OSError, match="folder"):
        write_atomic(tmp_path / "folder", b"x")
    assert read_json(target) == {"step": 1}
    assert sorted(os.listdir(tmp_path)) == ["folder", "state.json"]


def test_a_missing_file_is_none_and_a_torn_one_is_an_error(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none") is None
    (tmp_path / "torn").write_text('{"step": ')
    with pytest.raises(ValueError, match="Expecting"):
        read_json(tmp_path / "torn")


def test_readers_only_ever_see_whole_files(tmp_path: Path) -> None:
    target = tmp_path / "attempt"
    write_json_atomic(target, ["0"] * 5000, durable=False)
    stop = threading.Event()
    seen: set[str] = set()

    def read() -> None:
        while not stop.is_set():
            words = read_json(target)
            assert len(words) == 5000
            assert len(set(words)) == 1
            seen.add(words[0])

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 60):
        write_json_atomic(target, [str(number)] * 5000, durable=False)
    stop.set()
    reader.join()
    assert len(seen) > 1, "the reader never met a change: this run proved nothing"


def test_a_writer_killed_at_any_moment_leaves_an_old_or_a_new_file(tmp_path: Path) -> None:
    target = tmp_path / "index.json"
    code = (
        "import sys\nfrom slurm_resilience._atomic import write_json_atomic\nn = 0\n"
        "while True:\n    n += 1\n    write_json_atomic(sys.argv[1], [n] * 20000)\n    print(n, flush=True)\n"
    )
    for wanted in (1, 3, 4):
        writer = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < wanted:
            pass
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        found = json.loads(target.read_text())
        assert len(found) == 20000
        assert len(set(found)) == 1


def test_a_device_a_pipe_and_a_link_that_somebody_names_are_written_into_and_never_replaced(tmp_path: Path) -> None:
    """`report --output /dev/null` by root made an ordinary file of it, and nobody else could open it any more."""
    plain, link, null, pipe = (tmp_path / name for name in ("plain", "link", "null", "pipe"))
    write_output(plain, "old and long")
    before = plain.stat().st_ino
    write_output(plain, "new")
    assert plain.stat().st_ino != before, "a regular file is replaced as a whole"

    link.symlink_to(plain)
    write_output(link, "through")
    assert link.is_symlink()
    assert plain.read_text() == "through"

    null.symlink_to(os.devnull)
    write_output(null, "away")
    assert null.is_symlink()
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)

    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_output(pipe, "heard")
    reader.join(30)
    assert read == ["heard"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "null", "pipe", "plain"]
