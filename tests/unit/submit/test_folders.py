"""A run's folder: new, writable, shared; everything else is refused before anything is written."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import ConfigError
from slurm_resilience.submit.folders import check_folder, file_system, new_run_dir, seen_by_nodes


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


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "folder", ["/closed/nope", "~nobody-of-this-name/x", "/x" * 3000, "/" + "n" * 300 + "/x", "/proc/1/nope"]
)
def test_what_may_not_be_looked_into_is_refused_like_all_else(
    folder: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may look everywhere: the kernel's refusal is put where an ordinary user meets it."""
    real = os.stat

    def stat(path: Any, **how: Any) -> os.stat_result:
        if os.fspath(path).startswith("/closed/"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, **how)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_folder(folder, shared=shared)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_as_an_ordinary_user_in_a_folder_of_root(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setuid(65534)
            check_folder(closed / "nope", shared=False)
        except ConfigError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_name_with_a_zero_byte_is_refused_everywhere() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        check_folder("a\0b", shared=False)


def test_which_folders_the_nodes_see_as_we_do() -> None:
    assert seen_by_nodes(Path("/usr"))
    assert not seen_by_nodes(Path("/tmp/x"))
    assert not seen_by_nodes(Path("/proc"))
