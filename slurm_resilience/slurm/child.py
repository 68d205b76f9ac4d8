"""Running one Slurm command so that neither a signal to us nor a silent controller can harm the caller.

A command that we start inside a job is in the same step, and gets the same SIGTERM and SIGCONT as we do, often in
the very requeue that it asks for (a plain ``scontrol requeue`` then dies with code 143 before it has its answer).
So TERM, CONT, USR1, USR2, INT and HUP are blocked in the calling thread around the fork: a signal mask, unlike a
handler, survives ``exec``, and there is no instant in which the child is open to them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_resilience.slurm.failures import CommandMissing, CommandNotStarted, CommandTimeout

SHIELDED = (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)

# C locale: we read messages.  UTC and the standard format: times without a zone then have one meaning, also in the
# hour that daylight saving repeats.  Source: slurm(1) man pages, SLURM_TIME_FORMAT.
_SPEAK_PLAINLY = {"LC_ALL": "C", "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}


@dataclass(frozen=True)
class Finished:
    """One command that ran to its end.  ``code`` is negative for a signal."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float

    @property
    def evidence(self) -> str:
        """The command, its code and what it wrote on stderr, in one line."""
        said = " ".join(self.err.split()) or " ".join(self.out.split())[:300]
        return f"`{' '.join(self.argv)}` ended with code {self.code} after {self.seconds:.1f} s and said: {said or 'nothing'}"


def run(
    argv: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None, folder: str | None = None
) -> Finished:
    """Run ``argv`` to its end, at most ``timeout_s`` seconds, shielded from the signals of a job's end.

    Raises :class:`CommandMissing` when there is no such command, :class:`CommandNotStarted` when it could not be started now,
    :class:`CommandTimeout` when it had to be killed.
    A code other than 0 is for the caller to judge.  ``folder``: where it runs, for commands that leave files behind.
    """
    started = time.monotonic()
    env = {**(os.environ if environment is None else environment), **_SPEAK_PLAINLY}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=folder,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError as error:
        raise CommandMissing(
            f"There is no command {argv[0]!r} here",
            evidence=f"it is not on PATH={env.get('PATH', '')}",
            remedy="run this where Slurm's client commands are installed, or put them on PATH (in a container: bind them in)",
        ) from error
    except OSError as error:
        raise CommandNotStarted(
            f"`{' '.join(argv)}` could not be started",
            evidence=f"{type(error).__name__}: {error}",
            remedy="this machine has run out of memory, processes or open files, or may not execute it; Slurm was not asked",
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            _, err = child.communicate(timeout=2.0)
        except subprocess.TimeoutExpired:  # unkillable (state D): leave it, the caller must not wait on it
            err = ""
        raise CommandTimeout(
            f"`{' '.join(argv)}` gave no answer",
            evidence=f"killed after {timeout_s:g} s; it had said: {' '.join(err.split()) or 'nothing'}",
            remedy="the controller may be busy or down: `scontrol ping` tells",
        ) from None
    except BaseException:
        child.kill()
        raise
    return Finished(tuple(argv), child.returncode, out, err, time.monotonic() - started)
