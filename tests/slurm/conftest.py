"""One sandbox for all tests that need a real Slurm: healed between them, and never skipped in silence."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_resilience.sandbox import Sandbox
from slurm_resilience.sandbox.layout import ROOT

HERE = Path(__file__).parent
FIRST = os.environ.get("SLURM_RESILIENCE_TEST_SANDBOX") or "test"
NAMES = [FIRST, *(f"{FIRST}-{number}" for number in range(2, 9))]
KEEP = "SLURM_RESILIENCE_KEEP_SANDBOX"  # leave the sandbox up for a look after the tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def machine_can() -> None:
    """This machine can run a sandbox; else the test is "not run", which the summary shows and CI does not accept."""
    reason = Sandbox.why_not()
    if reason:
        pytest.skip(f"not run: {reason}")


@pytest.fixture(scope="session")
def sandbox(machine_can: None) -> Iterator[Sandbox]:
    """Four nodes, SlurmdTimeout and GraceTime as by default, shared by all tests."""
    with _own_name() as name:
        running = Sandbox.up(nodes=4, name=name)
        yield running
        if not os.environ.get(KEEP):
            running.down()


@contextmanager
def _own_name() -> Iterator[str]:
    """A name that is this session's alone while it lives: two sessions would heal and stop each other's sandbox.

    The kernel frees the name of a session that was killed, and its sandbox is used again.
    """
    ROOT.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        fd = os.open(ROOT / f".{name}.tests", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        try:
            yield name
        finally:
            os.close(fd)
        return
    pytest.fail(f"other test sessions on this machine use the sandboxes {', '.join(NAMES)}")


@pytest.fixture(scope="session")
def revivals(sandbox: Sandbox) -> int:
    """How often this Slurm requeues a job that ends well after it was preempted with a grace period: once, or not at all.

    See slurm_resilience.runtime.revival.
    """
    answer = sandbox.exec(["scontrol", "--version"], check=True).stdout
    year, month = (int(word) for word in answer.split()[1].split(".")[:2])
    return int((24, 5) <= (year, month) < (26, 5))


@pytest.fixture(autouse=True)
def _healed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does to the shared sandbox, the next one finds all nodes idle, no job, default settings."""
    if "sandbox" not in request.fixturenames:
        yield
        return
    running: Sandbox = request.getfixturevalue("sandbox")
    yield
    if running.state().cluster.settings:
        Sandbox.up(nodes=4, name=running.layout.name)
    running.heal()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failure shows what Slurm had to say."""
    report = yield
    running = getattr(item, "funcargs", {}).get("sandbox")
    if report.failed and isinstance(running, Sandbox):
        for path in sorted(running.layout.log.glob("slurm*[0-9d].log")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            report.sections.append((f"end of {path}", "\n".join(lines[-15 if path.stem == "slurmctld" else -4 :])))
    return report


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory, sandbox: Sandbox) -> Iterator[Path]:
    """A folder that alice owns and every node sees: for scripts, outputs, run folders and checkpoint roots."""
    import pwd
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="slurm-resilience-test-"))
    account = pwd.getpwnam("alice")
    os.chown(folder, account.pw_uid, account.pw_gid)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
