"""Which facts can stand in an event file, and what each of them says.

Names are in the past tense and never change their meaning; a field may be added, none is taken away.  The reference in
the documentation is printed from this table, and a test compares it with what the code really writes.
"""

from __future__ import annotations

from typing import NamedTuple


class Meaning(NamedTuple):
    """One sentence, and the fields that follow the envelope (those that do not apply are left out)."""

    says: str
    fields: tuple[str, ...] = ()


EVENTS: dict[str, Meaning] = {
    # the run and its allocations
    "run_started": Meaning("The first supervisor of this run began.", ("run_id", "argv")),
    "allocation_started": Meaning("A supervisor began on a set of nodes.", ("nodes", "job_id")),
    "supervisor_restarted": Meaning("A supervisor took the place of one that died in the same allocation."),
    "run_completed": Meaning("All ranks reached the end of their work.", ("step",)),
    "run_failed": Meaning("The run ended and will not be tried again.", ("cause", "reason", "exit_code")),
    # agents and attempts
    "agent_joined": Meaning("A node's agent connected.", ("node",)),
    "agent_lost": Meaning("A node's agent is gone or silent.", ("node", "why")),
    "attempt_started": Meaning("All ranks are about to be launched with this plan.", ("nodes", "world", "plan")),
    "ranks_launched": Meaning("Every node has started its ranks."),
    "attempt_stopped": Meaning("Nothing of the attempt is alive on the nodes that can be reached."),
    # faults and decisions
    "fault_detected": Meaning("Something ended the attempt.", ("cause", "node", "rank", "detail", "since")),
    "warning_received": Meaning("Slurm announced the end of the allocation.", ("signal", "cause", "deadline")),
    "decided": Meaning("What the supervisor does about it, and why.", ("action", "reason")),
    "requeue_started": Meaning("Slurm is asked to queue the job again."),
    "requeue_done": Meaning("Slurm has queued the job again."),
    # what ranks say
    "resumed": Meaning("A checkpoint was loaded.", ("step", "checkpoint", "seconds", "world")),
    "started_fresh": Meaning("There was no checkpoint; training starts at step 0."),
    "first_step": Meaning("Every rank has completed its first step of the attempt.", ("step", "loss")),
    "step_reported": Meaning("Progress of rank 0, thinned out.", ("step", "loss", "grad_norm", "lr", "samples")),
    "checkpoint_started": Meaning("A save began.", ("step",)),
    "checkpoint_committed": Meaning("A save is complete and in the index.", ("step", "name", "bytes", "seconds")),
    "checkpoint_failed": Meaning("A save was given up; the older ones stand.", ("step", "error")),
    "stopped": Meaning("A rank ended because it was asked to.", ("step", "why")),
    "finished": Meaning("A rank reached its last step.", ("step",)),
    "exception": Meaning("A rank's own code raised.", ("type", "message", "traceback", "step")),
    "phase_done": Meaning("A rank measured a part of its work.", ("name", "seconds")),
}  # fmt: skip
