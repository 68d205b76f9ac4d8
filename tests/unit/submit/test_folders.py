"""A run's folder: new, writable, shared; everything else is refused before anything is written."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from slurm_resilience.errors import ConfigError
from slurm_resilience.submit.folders import check_folder, file_system, new_run_dir


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")


@pytest.mark.parametrize("name", ["a b", "it's", 'q"q', "a;b", "%j x %", "ü$x", "#hash", "$HOME `id`", "-dash", "tab\tx"])
def test_odd_names_are_fine(plain: Path, name: str) -> None:
    """Each of them was tried on Slurm 22.05.8, as part of a log's name in a script."""
    assert check_folder(plain / name) == plain / name


@pytest.mark.parametrize("name", ["a\nb", "back\\slash", "bell\a", "x\r"])
def test_names_that_no_script_can_carry_are_refused(plain: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        check_folder(plain / name)


def test_without_slurm_any_name_will_do(tmp_path: Path) -> None:
    assert check_folder(tmp_path, shared=False) == tmp_path


def test_checking_makes_nothing(plain: Path) -> None:
    check_folder(plain / "new" / "deep")
    check_folder(plain)
    assert list(plain.iterdir()) == []


def test_in_this_machines_memory_is_refused() -> None:
    if file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("not run: /dev/shm is no tmpfs here")
    with pytest.raises(ConfigError, match="not shared with the nodes"):
        check_folder("/dev/shm/runs")
    check_folder("/dev/shm/runs", shared=False)


def test_usually_local_is_a_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_folder("/tmp/runs")
    assert any("local to each node" in str(one.message) for one in caught)


def test_a_file_is_no_folder(plain: Path) -> None:
    (plain / "file").touch()
    for path in (plain / "file", plain / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_folder(path)


def test_not_writable(plain: Path) -> None:
    if os.geteuid() == 0:
        with pytest.raises(ConfigError, match="cannot be written"):  # to root all folders look writable
            new_run_dir(check_folder("/proc/runs", shared=False), "x")
        return
    plain.chmod(0o555)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_folder(plain / "x")


class Noon:
    def monotonic(self) -> float:
        return 0.0

    def time(self) -> float:
        return 86400.0 * 365


def test_a_new_folder_for_every_run(plain: Path) -> None:
    first, second = (new_run_dir(plain / "runs", "my run/1", clock=Noon()) for _ in range(2))
    assert first.name == "my_run_1-19710101-000000"
    assert second.name == "my_run_1-19710101-000000-2"
    assert first.is_dir()


def test_mount_points_with_spaces_are_read(plain: Path) -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(plain) != ""
