"""Children: deadline, output cap, own session; files: no symlink, no half state, no trust in what others may write."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from slurm_resilience.hooks import child, files
from slurm_resilience.hooks.admin.conformance import tool


def test_a_hanging_child_ends_with_its_deadline_and_all_its_children(tmp_path: Path) -> None:
    script = tmp_path / "hang"
    script.write_text('#!/bin/sh\nsleep 300 &\necho $! > "$(dirname "$0")/pid"\nwait\n')
    script.chmod(0o755)
    started = time.monotonic()
    done = child.run([str(script)], 4.0)  # time for a shell of a busy machine to get to its second line
    assert 4.0 <= time.monotonic() - started < 100  # it would take 300 s
    assert done.code is None
    assert "no answer within 4 s" in done.problem
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "a grandchild outlived it"
        time.sleep(0.02)


def test_a_child_that_leaves_one_behind_with_its_output_open_does_not_hold_us(tmp_path: Path) -> None:
    script = tmp_path / "fork"
    script.write_text("#!/bin/sh\nsleep 300 &\necho done\n")
    script.chmod(0o755)
    started = time.monotonic()
    done = child.run([str(script)], 100.0)
    assert (done.code, done.out) == (0, "done\n")
    assert time.monotonic() - started < 50  # it was not held up to its deadline


def test_five_megabytes_are_cut(tmp_path: Path) -> None:
    done = child.run([str(tool(tmp_path / "flood", floods_bytes=5_000_000))], 60.0, cap_bytes=1000)
    assert (done.code, len(done.out), done.cut) == (0, 1000, True)


def test_what_cannot_be_run_is_said_and_not_raised(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a program")
    for argv in (["/nonexistent"], [str(tmp_path / "text")], ["scontrol"], [str(tmp_path)]):
        done = child.run(argv, 1.0)
        assert done.code is None
        assert done.problem


def test_the_environment_is_made_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/tmp/evil.so")
    monkeypatch.setenv("SLURM_JOB_COMMENT", "x")
    done = child.run(["/usr/bin/env"], 60.0)
    assert sorted(line.partition("=")[0] for line in done.out.split()) == ["LC_ALL", "PATH"]


def test_a_child_has_a_session_of_its_own_and_its_code_is_told() -> None:
    done = child.run(["/bin/sh", "-c", "ps -o sid= -p $$; exit 7"], 60.0)
    assert done.code == 7
    assert int(done.out) != os.getsid(0)
    assert child.run(["/bin/sh", "-c", "kill -9 $$"], 60.0).code == -9


def test_a_function_that_raises_is_a_code(tmp_path: Path) -> None:
    def boom() -> str:
        raise RuntimeError("boom")

    done = child.start(boom, "boom").finish(60.0)
    assert (done.code, "boom" in done.out) == (70, True)


def test_no_descriptor_is_left_open() -> None:
    child.run(["/bin/true"], 60.0)
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        child.run(["/bin/true"], 60.0)
        child.run(["/nonexistent"], 60.0)
    assert os.listdir("/proc/self/fd") == before


def test_state_is_never_read_or_written_through_a_symlink(tmp_path: Path) -> None:
    """slurm-gcp#223: a link at a predictable name that points to /etc/shadow."""
    precious = tmp_path / "precious"
    precious.write_text("{}")
    link = tmp_path / "state.json"
    link.symlink_to(precious)
    with pytest.raises(OSError):  # noqa: PT011  ELOOP
        files.read(str(link))
    with pytest.raises(OSError):  # noqa: PT011
        files.append(str(link), "x")
    files.write_json(str(link), {"a": 1})  # replaces the link itself
    assert precious.read_text() == "{}"
    assert files.read_json(str(link)) == {"a": 1}
    assert link.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("torn", ["", "{", "[1]", "\x00\xff", "null", '{"a": '])
def test_torn_state_is_no_state(torn: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_text(torn)
    assert files.read_json(str(tmp_path / "s")) == {}


def test_trust_needs_the_whole_path(tmp_path: Path) -> None:
    assert files.distrust("/usr/bin/env") == ""
    assert "absolute" in files.distrust("usr/bin/env")
    assert "written by others" in files.distrust("/tmp/x") or "No such" in files.distrust("/tmp/x")
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    (open_folder / "x").write_text("")
    assert "can be written by others" in files.distrust(str(open_folder / "x"))
    theirs = tmp_path / "theirs"
    theirs.write_text("")
    os.chown(theirs, 2001, 2001)
    assert files.distrust(str(theirs))
    (tmp_path / "link").symlink_to(theirs)
    assert files.distrust(str(tmp_path / "link"))


def test_a_stuck_lock_is_given_up(tmp_path: Path) -> None:
    first, second = files.Lock(str(tmp_path / "l")), files.Lock(str(tmp_path / "l"))
    assert first.acquire()
    assert not second.acquire(0.1)
    first.release()
    assert second.acquire()
    second.release()


def test_json_state_is_one_document(tmp_path: Path) -> None:
    files.write_json(str(tmp_path / "x"), {"b": [1, 2]})
    assert json.loads((tmp_path / "x").read_text()) == {"b": [1, 2]}
    assert os.listdir(tmp_path) == ["x"]
