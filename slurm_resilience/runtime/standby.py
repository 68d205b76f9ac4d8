"""What a supervisor in the batch script does while another one, on another node, supervises its run.

It must not end: the batch script would end with it, and the job with that.  So it waits, and ends as the run does.  When the
other one is gone as well, and no agent has taken its place, it is its turn again.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience._atomic import read_json, write_json_atomic
from slurm_resilience.errors import ExitCode, FormatError
from slurm_resilience.runtime import epochs
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.processes import WARNING_SIGNALS
from slurm_resilience.runtime.run_folder import RunFolder, RunStatus
from slurm_resilience.slurm.environment import SlurmEnvironment

_CONNECT_S = 2.0
_LOOK_EVERY_S = 1.0
# Agents without a supervisor have elected another one by then, or have ended.
_DESERTED_S = 90.0
_LAST_WORD = "last-word.json"


@dataclass(frozen=True)
class LastWord:
    """How a run of this job has ended already: nothing is to be started, only the job to be ended so."""

    code: int
    sentence: str


def acts_elsewhere(before: SupervisorAddress, here: SlurmEnvironment) -> bool:
    """Whether a supervisor of this very allocation lives on another node: something answers at its address."""
    ours = (before.job_id, before.restart_count) == (here.job_id, here.restart_count)
    if not ours or before.node in ("", here.node):
        return False
    for host in (before.host, *before.others):
        with contextlib.suppress(OSError), socket.create_connection((host, before.port), timeout=_CONNECT_S):
            return True
    return False


def stand_by(folder: RunFolder, here: SlurmEnvironment, *, show: Callable[[str], None]) -> int | None:
    """Wait until the run has ended; its exit code.  None when nobody supervises it any more."""
    for number in (*WARNING_SIGNALS, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    show(f"slurm-resilience: another node supervises {folder.path}; {here.node} waits for the end of the run")
    pulse, since = "", time.monotonic()
    while True:
        try:
            status, seen = folder.status(), epochs.pulse(folder.path)
        except (FormatError, OSError):
            status, seen = None, pulse  # unknown: neither an end nor a sign of life
        if status is not None and status.state != "running":
            show(f"slurm-resilience: the run has ended: {status.state} {status.reason}".rstrip())
            return status.exit_code if status.exit_code is not None else int(ExitCode.INTERNAL)
        if seen != pulse:
            pulse, since = seen, time.monotonic()
        elif time.monotonic() - since > _DESERTED_S:
            show(
                f"slurm-resilience: no supervisor has shown a sign of life for {_DESERTED_S:g} s: {here.node} supervises again"
            )
            return None
        time.sleep(_LOOK_EVERY_S)


def last_word(run_dir: Path, here: SlurmEnvironment | None, status: RunStatus | None) -> LastWord | None:
    """What is left to say about a run that has ended before; None when it is to be started."""
    if status is not None and status.state == "complete":
        return LastWord(
            int(ExitCode.OK),
            f"{run_dir}: this run is complete (step {status.step}); nothing is started. To train on from its last "
            f"checkpoint, raise the number of steps in the script and remove {run_dir / 'state.json'}; to begin again, "
            "give another run folder",
        )
    if here is None:
        return None
    try:
        raw = read_json(run_dir / _LAST_WORD)
    except ValueError:
        return None
    if not isinstance(raw, dict) or (raw.get("job_id"), raw.get("restart")) != (here.job_id, here.restart_count):
        return None
    return LastWord(
        int(raw["code"]), f"{run_dir}: the run ended in the allocation before: {raw.get('reason')}; the job ends so"
    )


def leave_word(run_dir: Path, *, job_id: str, restart: int, code: int, reason: str) -> None:
    """Have the job's next run end with this code.  Raises OSError."""
    value = {"v": 1, "job_id": job_id, "restart": restart, "code": code, "reason": reason}
    write_json_atomic(run_dir / _LAST_WORD, value)
