"""Is Slurm installed here, and may we install it?  The only module that changes the machine's software."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurm_resilience.errors import SandboxError

# command -> Debian/Ubuntu package
_ALWAYS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "scontrol": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "useradd": "passwd",
}
_ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_POLICY = Path("/usr/sbin/policy-rc.d")
_POLICY_TEXT = "#!/bin/sh\n# slurm-resilience sandbox: its packages must not start services; removed again at once\nexit 101\n"


def find(command: str) -> str | None:
    """The command's absolute path; the usual system folders are searched besides PATH."""
    return shutil.which(command, path=f"{os.environ.get('PATH', '')}:{PATH}")


def path_of(command: str) -> str:
    """:func:`find`, or an error that names the package."""
    found = find(command)
    if found is None:
        package = {**_ALWAYS, **_ACCOUNTING}.get(command)
        raise SandboxError(
            f"The command {command!r} is not there", evidence=f"searched PATH and {PATH}",
            remedy=f"apt-get install {package}" if package else "install it",
        )  # fmt: skip
    return found


def missing(*, accounting: bool) -> list[str]:
    """The packages whose commands are not there."""
    wanted = {**_ALWAYS, **(_ACCOUNTING if accounting else {})}
    return sorted({package for command, package in wanted.items() if find(command) is None})


def ensure(*, accounting: bool) -> list[str]:
    """Have all that a sandbox needs, installing it where allowed; the packages that were installed.

    No service of the machine is started.  Raises :class:`SandboxError` with the exact command where it cannot.
    """
    lacking = missing(accounting=accounting)
    if not lacking:
        return []
    command = ["apt-get", "install", "-y", "--no-install-recommends", *lacking]
    advice = f"run, as root: apt-get update && {' '.join(command)}"
    if find("apt-get") is None:
        raise SandboxError(
            f"The sandbox needs {', '.join(lacking)}, which are not installed", evidence="their commands are not on PATH, and "
            "there is no apt-get here", remedy="use Debian 12 or Ubuntu 24.04, or install Slurm, munge, MariaDB and iproute2 "
            "by this system's own means",
        )  # fmt: skip
    with _no_services():
        result = _apt(command)
        if result.returncode != 0:  # a fresh container has no package lists
            _apt(["apt-get", "update"])
            result = _apt(command)
    lacking = missing(accounting=accounting)
    if lacking:
        output = (result.stdout + result.stderr).strip().splitlines()
        raise SandboxError(
            f"Cannot install {', '.join(lacking)}", evidence=f"apt-get ended with {result.returncode}: {' '.join(output[-3:])}",
            remedy=advice,
        )  # fmt: skip
    return command[4:]


def _apt(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8", "PATH": PATH}
    return subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, check=False)


@contextmanager
def _no_services() -> Iterator[None]:
    """Keep packages from starting their services.  Source: invoke-rc.d(8), /usr/sbin/policy-rc.d, 101 = forbidden."""
    theirs = _POLICY.with_name("policy-rc.d.before-slurm-resilience")
    if _POLICY.exists() and _POLICY.read_text(encoding="utf-8", errors="replace") != _POLICY_TEXT:
        _POLICY.replace(theirs)
    _POLICY.write_text(_POLICY_TEXT, encoding="utf-8")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
        if theirs.exists():
            theirs.replace(_POLICY)
