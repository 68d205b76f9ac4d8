"""Installing: only what is missing, no service started, and one sentence when it cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience.errors import SandboxError
from slurm_resilience.sandbox import packages


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty PATH, and a policy-rc.d that is not the machine's."""
    folder = tmp_path.parent / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(packages, "PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(packages, "find", lambda command: str(folder / command) if (folder / command).exists() else None)
    monkeypatch.setattr(packages, "_POLICY", folder / "policy-rc.d")
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def have(folder: Path, *, but: str = "") -> None:
    for command in {**packages._ALWAYS, **packages._ACCOUNTING}:
        if command != but:
            program(folder / command, "#!/bin/sh\n")


def test_nothing_is_installed_when_all_is_there(bin_dir: Path) -> None:
    have(bin_dir)
    program(bin_dir / "apt-get", f"#!/bin/sh\ntouch {bin_dir}/called\n")
    assert packages.ensure(accounting=True) == []
    assert not (bin_dir / "called").exists()


def test_without_apt_the_missing_packages_are_named(bin_dir: Path) -> None:
    have(bin_dir, but="slurmd")
    with pytest.raises(SandboxError) as caught:
        packages.ensure(accounting=True)
    assert "slurmd" in str(caught.value)
    assert "munge," not in str(caught.value).partition("How we know")[0]


def test_an_install_that_fails_shows_apt_s_words_and_the_command(bin_dir: Path) -> None:
    have(bin_dir, but="slurmdbd")
    program(bin_dir / "apt-get", "#!/bin/sh\necho 'E: Unable to locate package' >&2\nexit 100\n")
    with pytest.raises(SandboxError) as caught:
        packages.ensure(accounting=True)
    assert "E: Unable to locate package" in str(caught.value)
    assert "apt-get update && apt-get install -y --no-install-recommends slurmdbd" in str(caught.value)
    assert not (bin_dir / "policy-rc.d").exists()
    assert packages.ensure(accounting=False) == [], "without accounting it is not missed"


def test_lists_are_fetched_when_there_are_none_and_no_service_may_start(bin_dir: Path) -> None:
    have(bin_dir, but="slurmd")
    (bin_dir / "policy-rc.d").write_text("#!/bin/sh\nexit 0\n# the admin's\n")
    script = f"""#!/bin/sh
cd {str(bin_dir)!r}
echo "$@" >> calls
case $1 in
update) touch lists ;;
install) test -e lists || exit 100
    ./policy-rc.d; test $? = 101 || exit 1
    printf '#!/bin/sh\\n' > slurmd; chmod 755 slurmd ;;
esac
"""
    program(bin_dir / "apt-get", script)
    assert packages.ensure(accounting=True) == ["slurmd"]
    calls = (bin_dir / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["install", "update", "install"]
    assert "the admin's" in (bin_dir / "policy-rc.d").read_text(), "the admin's own policy is back"
