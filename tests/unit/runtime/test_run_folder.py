"""The folder of a run: whole files, refused where it makes no sense."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from slurm_resilience._atomic import write_json_atomic
from slurm_resilience.errors import ConfigError, FormatError
from slurm_resilience.runtime.run_folder import RunFolder, RunStatus


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / 'it\'s "ä";\n$x')
    made.prepare()
    return made


def test_a_run_keeps_its_id_and_takes_the_new_configuration(folder: RunFolder) -> None:
    first = folder.open_run(argv=["a"], config={"nodes": [1, 2]})
    created = folder.run()["created"]  # type: ignore[index]
    assert folder.open_run(argv=["b"], config={"nodes": [1, 4]}, wrap=["w"]) == first
    assert folder.run() == {
        "v": 1,
        "run_id": first,
        "created": created,
        "argv": ["b"],
        "wrap": ["w"],
        "config": {"nodes": [1, 4]},
    }


def test_what_was_written_is_read(folder: RunFolder) -> None:
    assert (folder.attempt(), folder.status(), folder.run()) == (0, None, None)
    folder.write_attempt(12)
    folder.write_status(RunStatus("failed", "hang", "because", 82, 41))
    assert folder.attempt() == 12
    assert folder.status() == RunStatus("failed", "hang", "because", 82, 41)


def test_an_attempt_number_is_never_guessed(folder: RunFolder) -> None:
    (folder.path / "attempt").write_text("twelve\n")
    with pytest.raises(FormatError, match="newest logs/attempt-NNNN"):
        folder.attempt()


@pytest.mark.parametrize("text", ["{", "[]", '{"v": 99}', '{"v": "1"}', "{}"])
def test_a_document_of_somebody_else_or_of_later_is_refused(folder: RunFolder, text: str) -> None:
    (folder.path / "state.json").write_text(text)
    with pytest.raises(FormatError):
        folder.status()


def test_a_field_of_a_newer_release_is_passed_over(folder: RunFolder) -> None:
    write_json_atomic(folder.path / "state.json", {"v": 1, "state": "running", "mood": "good"})
    assert folder.status() == RunStatus("running", None, None)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_made_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="share") as caught:
        RunFolder(tmp_path / "file" / "run").prepare()
    assert "NotADirectoryError" in caught.value.evidence


def test_preparing_leaves_no_probe(folder: RunFolder) -> None:
    assert sorted(os.listdir(folder.path)) == ["checkpoints", "logs"]


def test_a_folder_on_a_full_disk_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """A limit of file size stands for the disk: the kernel refuses the bytes, and not the name."""
    program = textwrap.dedent(
        f"""
        import resource
        from slurm_resilience.errors import ConfigError
        from slurm_resilience.runtime.run_folder import RunFolder
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        try:
            RunFolder({os.fspath(tmp_path / "r")!r}).prepare()
        except ConfigError as error:
            raise SystemExit(0 if "cannot be written" in error.what else 1)
        raise SystemExit(2)
        """
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
    assert [path.name for path in (tmp_path / "r").iterdir() if path.is_file()] == []
