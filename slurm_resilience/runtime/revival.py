"""What if Slurm brings a job back although its run has ended?  ``python -m slurm_resilience.runtime.revival``.

From 24.05 on slurmctld requeues a job whose batch script ends within the grace period of a preemption, whatever its
code, and up to 25.11 it takes every later end of that job for such a one: its mark is not removed by a requeue, nor
by a run that begins.  So a run that was preempted once and then ended well is requeued by Slurm, waits for two minutes,
and then for as many nodes as the job asks for, to say that it is complete.  Nobody can prevent that: it is decided when
the batch script has ended.  But a step of the job outlives its script for KillWait.  So the supervisor starts this
process just before the end.  It does nothing unless the job is requeued; then it has the job come back on one node, at
once, and end with the code of the run.

Source: seen on 24.11.5; ``_job_complete()`` in job_mgr.c and GRACE_PREEMPT in ``_slurm_rpc_complete_batch_script()``,
proc_req.c, of 24.11.5; mended in 26.05 (SchedMD's ticket 25682, test of GraceTime with REQUEUE in its testsuite).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_resilience.errors import SlurmError
from slurm_resilience.observe.events import read_events
from slurm_resilience.runtime.backend_slurm import step_command, step_environment
from slurm_resilience.runtime.requeue import requeue
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.runtime.standby import leave_word
from slurm_resilience.runtime.surroundings import Surroundings
from slurm_resilience.slurm.child import SHIELDED
from slurm_resilience.slurm.client import CommandClient, SlurmClient

_SINCE = (24, 5)
# An interpreter that starts on a busy node; without an answer by then the job ends as Slurm has it.
_READY_WITHIN_S = 15.0
_READY = b"ready"
# While the batch script ends, maybe after lines of the user's own; its end wakes us by TERM.
_LOOK_EVERY_S = 5.0
_LOOK_AGAIN_S = 0.2
_SETTLES_WITHIN_S = 20.0


def expect_revival(folder: RunFolder, around: Surroundings, node: str, code: int, *, say: Callable[[str], None]) -> None:
    """Before the batch script on ``node`` ends with ``code``: where Slurm may requeue the job for that, have somebody there."""
    if not may_come_back(around.settings) or not _was_preempted(folder.path):
        return
    module = ["slurm_resilience.runtime.revival", "--run-dir", str(folder.path), "--job", around.job_id]
    module += ["--restart", str(around.restart), "--code", str(code)]
    binds = "affinity" in around.settings.get("TaskPlugin", "affinity")
    command = step_command(around.raw_job_id, node, module, binds=binds, gpus=0, name="resilience-end")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env=step_environment(gpus=True),
        )  # fmt: skip
    except OSError as error:
        say(f"slurm-resilience: should Slurm requeue this job at its end, nobody will be there to speed that up: {error}")
        return
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    said = _first_line(child)
    if said != _READY:
        words = said.decode(errors="replace") or f"no answer within {_READY_WITHIN_S:g} s"
        say(f"slurm-resilience: should Slurm requeue this job at its end, nobody will be there to speed that up: {words}")
    # its srun ends with the batch script; the step, once ready, does not need it


def may_come_back(settings: Mapping[str, str]) -> bool:
    """Whether this Slurm may requeue a preempted job that has ended by itself.  True where its release is not known."""
    found = re.match(r"(\d+)\.(\d+)", settings.get("SLURM_VERSION", ""))
    return found is None or (int(found[1]), int(found[2])) >= _SINCE


def _was_preempted(run_dir: Path) -> bool:
    return any(event.get("cause") == "preemption" for event in read_events(run_dir))


def _first_line(child: subprocess.Popen[bytes]) -> bytes:
    """The first line that it writes; empty when none comes in time, or it ends."""
    assert child.stdout is not None
    deadline, said = time.monotonic() + _READY_WITHIN_S, b""
    while b"\n" not in said and (left := deadline - time.monotonic()) > 0:
        if not select.select([child.stdout], [], [], left)[0]:
            break
        more = os.read(child.stdout.fileno(), 4096)
        if not more:
            break
        said += more
    return said.partition(b"\n")[0].strip()


def attend(client: SlurmClient, run_dir: Path, job_id: str, restart: int, code: int, *, pause: Callable[[float], bool]) -> str:
    """Wait for the job's end, and shape what Slurm makes of it; what came of that, "" when the job is just over.

    ``pause(seconds)``: wait for so long, or until Slurm tells the job to end, and say whether it has.
    """
    until: float | None = None
    while True:
        told = pause(_LOOK_EVERY_S if until is None else _LOOK_AGAIN_S)
        if told and until is None:
            until = time.monotonic() + _SETTLES_WITHIN_S
        try:
            record = client.job(job_id)
        except SlurmError:
            record = None
        if record is not None and record.restarts > restart:
            break
        if record is not None and not record.state.running:
            return ""
        if until is not None and time.monotonic() > until:
            until = None  # that was not the end
    folder = RunFolder(run_dir)
    status = folder.status()
    with contextlib.suppress(OSError):
        leave_word(run_dir, job_id=job_id, restart=restart + 1, code=code, reason=status.reason if status is not None else "")
    outcome = requeue(client, job_id, restart_count=restart, nodes=(1, 1), marker=run_dir.name)
    return f"Slurm has requeued job {job_id} after the end of its run, as it had been preempted: {outcome.reason}"


def main(argv: list[str] | None = None) -> int:
    """Called by :func:`expect_revival`, as a step of the job."""
    parser = argparse.ArgumentParser(prog="python -m slurm_resilience.runtime.revival", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--restart", type=int, required=True)
    parser.add_argument("--code", type=int, required=True)
    args = parser.parse_args(argv)
    signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    print(_READY.decode(), flush=True)

    def pause(seconds: float) -> bool:
        heard = signal.sigtimedwait({signal.SIGTERM}, seconds)
        return heard is not None

    said = attend(CommandClient(), args.run_dir, args.job, args.restart, args.code, pause=pause)
    if said:
        with contextlib.suppress(OSError), RunFolder(args.run_dir).open_log("supervisor") as log:
            log.write(f"slurm-resilience: {said}\n")
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
