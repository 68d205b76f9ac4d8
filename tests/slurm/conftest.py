"""One sandbox for all tests that need a real Slurm: healed between them, and never skipped in silence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resilience.errors import SandboxError
from slurm_resilience.sandbox import Sandbox

HERE = Path(__file__).parent
NAME = os.environ.get("SLURM_RESILIENCE_TEST_SANDBOX", "test")  # two people testing on one machine need two
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
    running = Sandbox.up(nodes=4, name=NAME)
    yield running
    if not os.environ.get(KEEP):
        running.down()


@pytest.fixture(autouse=True)
def _healed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does to the shared sandbox, the next one finds all nodes idle, no job, default settings."""
    if "sandbox" not in request.fixturenames:
        yield
        return
    running: Sandbox = request.getfixturevalue("sandbox")
    yield
    if running.state().cluster.settings:
        Sandbox.up(nodes=4, name=NAME)
    running.heal()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failure shows what Slurm had to say."""
    report = yield
    if report.failed and "sandbox" in getattr(item, "fixturenames", ()):
        try:
            running = Sandbox.attach(NAME)
        except SandboxError as error:
            report.sections.append(("sandbox", str(error)))
        else:
            for log, lines in (("slurmctld", 15), *((f"slurmd.{name}", 4) for name in running.nodes)):
                path = running.layout.log_of(log)
                if path.exists():
                    tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
                    report.sections.append((f"end of {path}", "\n".join(tail)))
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
