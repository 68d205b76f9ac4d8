"""When should a requeued job begin, so that it waits seconds and not minutes?

A begin time in the *future* when the job leaves COMPLETING is left alone by slurmctld, where one that has passed is
overwritten by "now + 121 s": so it must be later than the last epilog.  But nothing wakes the scheduler when a begin time
comes: it looks when a job completes (too early for us), and then at its next tick, up to 30 s later.  Unless something
asked for it in the meantime: it answers such requests at most every 3 s (batch_sched_delay).  So where a job completes
quickly, its supervisor asks once (any update of a job does), lets that pass go by, sets StartTime=now+2, which asks
again, and leaves at once: the second pass comes 3 s after the first, when the begin time has just come.

Source: measured on 22.05.8; ``batch_requeue_fini()`` in job_mgr.c, ``_slurmctld_background()`` in controller.c.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from slurm_resilience.slurm.client import AccountingRecord

# Time enough to complete where nothing slows it down; then the scheduler's second pass can be met.
QUICK_S = 2.0
_WITH_EPILOG_S = 7.0


def begin_in_s(config: Mapping[str, str], runs: Sequence[AccountingRecord] = ()) -> float:
    """How far away the begin time must be so that the job has surely left COMPLETING by then.

    Going by what it took after earlier ``runs`` of the job: accounting has when each ended, and the next was submitted when
    the nodes were done.  Without any, by the site's ``config``: with no epilog it takes a fraction of a second, once all
    processes are gone; what an epilog takes is not ours to know.  Too short costs two minutes, too long some seconds.
    """
    took = [
        later.submit_at - earlier.end_at
        for earlier, later in itertools.pairwise(runs)
        if later.submit_at is not None and earlier.end_at is not None
    ]
    if took:
        longest = max(took[-5:])
        return QUICK_S if longest < 1.0 else math.ceil(longest) + 3.0  # both ends are whole seconds
    epilogs = [value for name, value in config.items() if name in ("Epilog", "EpilogSlurmctld") or name.startswith("Epilog[")]
    return _WITH_EPILOG_S if not config or any(epilogs) else QUICK_S
