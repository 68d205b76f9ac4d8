"""Directories are made whoever else makes them at the same moment."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from slurm_resilience.checkpoint import folders


def test_parents_are_made_and_closed_to_others(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folders.ensure(tmp_path / "a" / "b")
        folders.ensure(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    assert [oct((tmp_path / name).stat().st_mode & 0o777) for name in ("a", "a/b")] == ["0o755", "0o755"]


def test_one_that_exists_and_is_not_seen_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "File exists" from a parallel file system whose other half does not know it yet (Automodel#3686)."""
    real = os.mkdir

    def race(path: Path, mode: int = 0o777) -> None:
        threading.Timer(0.1, real, (path, mode)).start()
        raise FileExistsError(17, "File exists", str(path))

    monkeypatch.setattr(os, "mkdir", race)
    folders.ensure(tmp_path / "a")
    assert (tmp_path / "a").is_dir()


def test_a_file_in_the_way_is_an_error_after_a_while(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(FileExistsError):
        folders.ensure(tmp_path / "a", patience_s=0.05)
