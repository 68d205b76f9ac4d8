"""Only files that nobody else can write are unpickled; a group is trusted by name alone."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest

from slurm_resilience.checkpoint.errors import UntrustedCheckpoint
from slurm_resilience.checkpoint.trust import Trust
from slurm_resilience.errors import ConfigError

LAB, OTHER = 4242, 4343
MATE, STRANGER = 5001, 5002


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {MATE: "mate", STRANGER: "stranger", os.geteuid(): "me"}

    def user(uid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd((names[uid], "x", uid, 100, "", "/", "/bin/sh"))

    def group(gid: int) -> grp.struct_group:
        return grp.struct_group(("lab", "x", gid, ["mate"] if gid == LAB else []))

    monkeypatch.setattr(pwd, "getpwuid", user)
    monkeypatch.setattr(grp, "getgrgid", group)


def info(mode: int, uid: int | None = None, gid: int = OTHER, *, folder: bool = False) -> os.stat_result:
    kind = stat.S_IFDIR if folder else stat.S_IFREG
    return os.stat_result((kind | mode, 0, 0, 1, os.geteuid() if uid is None else uid, gid, 0, 0, 0, 0))


@pytest.mark.usefixtures("accounts")
@pytest.mark.parametrize(
    ("found", "alone", "with_lab"),
    [
        (info(0o644), True, True),
        (info(0o644, uid=0), True, True),
        (info(0o600), True, True),
        (info(0o664), False, False),
        (info(0o646), False, False),
        (info(0o664, gid=LAB), False, True),
        (info(0o666, gid=LAB), False, False),
        (info(0o644, uid=STRANGER), False, False),
        (info(0o644, uid=STRANGER, gid=LAB), False, False),
        (info(0o644, uid=MATE), False, False),
        (info(0o664, uid=MATE, gid=LAB), False, True),
        (info(0o1777, folder=True), True, True),
        (info(0o2775, gid=LAB, folder=True), False, True),
    ],
)
def test_who_may_own_and_write(found: os.stat_result, alone: bool, with_lab: bool) -> None:
    for trust, fine in ((Trust(), alone), (Trust(LAB), with_lab)):
        if fine:
            trust.check("file", found)
        else:
            with pytest.raises(UntrustedCheckpoint):
                trust.check("file", found)


def test_a_group_is_found_by_name_or_refused() -> None:
    mine = grp.getgrgid(os.getegid())
    assert Trust.of(mine.gr_name) == Trust(mine.gr_gid)
    assert Trust.of(None) == Trust()
    with pytest.raises(ConfigError, match="no group 'nobody-has-this'"):
        Trust.of("nobody-has-this")


def test_the_remedy_is_a_command_that_helps(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    file.chmod(0o666)
    with pytest.raises(UntrustedCheckpoint, match="chmod go-w"):
        Trust().check(file, file.stat())
