"""What else does a job need to end once its run has?  Nothing, where its batch script lives and all its nodes do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from slurm_resilience.errors import Cause, SlurmError
from slurm_resilience.observe.events import EventWriter, read_events
from slurm_resilience.runtime.history import History
from slurm_resilience.runtime.requeue import requeue
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.runtime.standby import leave_word
from slurm_resilience.runtime.surroundings import Surroundings
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.nodeset import fold

# A batch script that lives after all, with a supervisor that stands by, ends the job by itself within this time.
_OWN_END_S = 15.0
_LOOK_EVERY_S = 0.5


def leave_the_dead(client: SlurmClient, folder: RunFolder, around: Surroundings, *, say: Callable[[str], None]) -> None:
    """Take nodes that are lost out of the job before it ends: Slurm would keep it COMPLETING until it has given them up.

    That takes SlurmdTimeout, 300 s by default.  What Slurm refuses stays as it is.
    """
    present = History.replay(read_events(folder.path)).present
    if set(around.nodes) <= present:
        return
    try:
        record = client.job(around.job_id)
        left = [name for name in record.nodes if name in present]
        if record.state.running and left and len(left) < len(record.nodes):
            client.update(around.job_id, NodeList=fold(left))
            say(f"slurm-resilience: lost nodes are taken out of the job, so that it can end: {fold(left)} are left")
    except SlurmError as error:
        say(f"slurm-resilience: the lost nodes stay in the job, which may be COMPLETING for a while: {error.what}")


def end_job(client: SlurmClient, folder: RunFolder, around: Surroundings, code: int, *, say: Callable[[str], None]) -> None:
    """Have the job end with this code, unless it ends by itself."""
    if _ends_by_itself(client, around):
        return
    status = folder.status()
    reason = status.reason if status is not None else ""
    leave_word(folder.path, job_id=around.job_id, restart=around.restart + 1, code=code, reason=reason)
    history = History.replay(read_events(folder.path))
    lost = sorted(set(around.nodes) - history.present)
    outcome = requeue(client, around.job_id, restart_count=around.restart, nodes=(1, 1), dead=lost, marker=folder.path.name)
    how = "requeued" if outcome.ok else "cancelled"
    say(f"slurm-resilience: no batch script is left to end job {around.job_id} with code {code}: {how} ({outcome.reason})")
    with contextlib.suppress(OSError):
        writer = EventWriter(folder.path, restart=around.restart)
        writer.write("job_ended_for_batch_host", t=time.time(), attempt=folder.attempt(), exit_code=code, how=how)
    if not outcome.ok and (status is None or status.cause != Cause.CANCELLED):
        client.cancel(around.job_id)


def _ends_by_itself(client: SlurmClient, around: Surroundings) -> bool:
    deadline = time.monotonic() + _OWN_END_S
    while time.monotonic() < deadline:
        try:
            record = client.job(around.job_id)
        except SlurmError:
            record = None
        if record is not None and (not record.state.running or record.restarts != around.restart):
            return True
        time.sleep(_LOOK_EVERY_S)
    return False
