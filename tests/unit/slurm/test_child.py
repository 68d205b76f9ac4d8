"""Commands run to their end, in time, whatever signals rain on the job."""

from __future__ import annotations

import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from slurm_resilience.slurm import child
from slurm_resilience.slurm.failures import CommandMissing, CommandTimeout, ControllerUnreachable

SHOOT_MYSELF = (
    "import os, signal\n"
    "for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT): os.kill(os.getpid(), s)\n"
    "print('alive')"
)


def test_a_command_survives_the_signals_of_a_jobs_end() -> None:
    done = child.run([sys.executable, "-c", SHOOT_MYSELF], timeout_s=60)
    assert (done.code, done.out) == (0, "alive\n")


def test_the_caller_is_as_open_to_signals_as_before() -> None:
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        child.run(["true"], timeout_s=60)
        with pytest.raises(CommandMissing):
            child.run(["there-is-no-such-command"], timeout_s=60)
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_machine_that_cannot_start_it_now_is_asked_again_later() -> None:
    """An OSError would end the thread that asks, and a warning would stay without an answer."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(ControllerUnreachable, match="could not be started") as refused:
            child.run(["true"], timeout_s=60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "Too many open files" in refused.value.evidence
    assert child.run(["true"], timeout_s=60).code == 0


def test_a_command_that_does_not_answer_is_killed_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(CommandTimeout, match="gave no answer") as caught:
        child.run(
            ["sh", "-c", "echo half >&2; exec sleep 600"],
            timeout_s=4.0,
        )
    assert time.monotonic() - started < 100
    assert "half" in caught.value.evidence


def test_what_it_said_is_kept(tmp_path: Path) -> None:
    done = child.run(["sh", "-c", "pwd; echo broken >&2; exit 3"], timeout_s=60, folder=str(tmp_path))
    assert done.code == 3
    assert done.out == f"{tmp_path}\n"
    assert "code 3" in done.evidence
    assert "broken" in done.evidence


def test_it_speaks_plainly() -> None:
    said = child.run(
        ["sh", "-c", "echo $LC_ALL $TZ $SLURM_TIME_FORMAT"],
        timeout_s=60,
        environment={"LC_ALL": "de_DE", "PATH": "/bin:/usr/bin"},
    )
    assert said.out.split() == ["C", "UTC", "standard"]
