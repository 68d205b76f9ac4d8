"""What all tests share: `--long`, "not run: why" instead of silent skips, and paths that break careless code."""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

# torch worlds of several ranks share two cores; and no thread pool may exist before a fork
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shrinking and timing must not depend on how busy the machine is; the examples stay the same from run to run.
settings.register_profile("steady", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("steady")

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
# About half of the time that the cluster's tests take
BEGIN_WITH = ("test_faults", "test_hooks", "test_requeue")
LEFT_OUT: list[int] = []
ODD_NAME = 'it\'s "ä";\n$x'


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups; folders' own hooks come before this one
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # what needs no cluster first: it fails in seconds
    items.sort(key=lambda item: (item.get_closest_marker("slurm") is not None, "unit" not in item.path.parts))
    if hasattr(config, "workerinput"):
        _make_two_streams(items)
    if config.getoption("--long"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = len(left_out)


def _make_two_streams(items: list[pytest.Item]) -> None:
    """Tests of the cluster mostly wait, the others mostly compute: one process of pytest-xdist begins with each kind.

    Cluster tests of one file stay together on one sandbox; whoever is done first takes the files at the end.  pytest 9.2 loses
    the groups of pytest-xdist 3.8: then both processes begin with the cluster's tests, each on a sandbox of its own.
    """
    for item in items:
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.xdist_group("slurm" if item.path.stem in BEGIN_WITH else item.path.stem))
    items.sort(key=lambda item: item.path.stem not in BEGIN_WITH)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    LEFT_OUT.append(getattr(node, "workeroutput", {}).get("left_out", 0))


def _not_run(config: pytest.Config) -> dict[str, list[str]]:
    """Reason -> tests, for everything that was collected and did not run."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reasons: dict[str, list[str]] = defaultdict(list)
    for report in reporter.stats.get("skipped", []) if reporter else []:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ").removeprefix("not run: ")].append(report.nodeid)
    return reasons


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if IN_CI and exitstatus == pytest.ExitCode.OK and _not_run(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reasons = _not_run(config)
    if reasons:
        terminalreporter.section("not run")
        for reason, tests in sorted(reasons.items()):
            terminalreporter.write_line(f"not run: {reason}")
            for name in tests:
                terminalreporter.write_line(f"    {name}")
        if IN_CI:
            terminalreporter.write_line("CI=true: what was not run counts as failed", red=True)
    if not config.getoption("--long"):
        left_out = max(LEFT_OUT, default=0) or sum(
            item.get_closest_marker("long") is not None for item in terminalreporter.stats.get("deselected", [])
        )
        if left_out:
            terminalreporter.write_line(f"left out: {left_out} long tests (bash tests/run.sh --long)")


def pytest_unconfigure(config: pytest.Config) -> None:
    # What a failed test has left behind may ignore TERM, and the interpreter's own exit would wait for it for ever.
    for child in multiprocessing.active_children():
        child.kill()


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A folder whose name has what careless code trips over: quotes, a semicolon, a newline, a dollar, an umlaut."""
    odd = tmp_path / ODD_NAME
    odd.mkdir()
    return odd
