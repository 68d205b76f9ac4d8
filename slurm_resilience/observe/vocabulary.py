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


FROM_SUPERVISOR: dict[str, Meaning] = {
    # the run and its allocations
    "run_started": Meaning("The first supervisor of this run began.", ("run_id", "argv")),
    "allocation_started": Meaning("A supervisor began on a set of nodes.", ("nodes", "job_id")),
    "allocation_lost": Meaning(
        "The supervisor of the allocation before this one left no word of its end: it died with its node, or was killed.",
        ("job_id", "of_restart", "last_word"),
    ),
    "supervisor_restarted": Meaning("A supervisor took the place of one that died in the same allocation.", ("nodes",)),
    "supervisor_took_over": Meaning(
        "An agent's node supervises the run in place of a node from which nothing was heard.",
        ("node", "silent_s", "nodes", "lost"),
    ),
    "supervisor_was_frozen": Meaning("The supervisor itself did not run for a while.", ("seconds",)),
    "job_ended_for_batch_host": Meaning(
        "No batch script was left to end the job; the supervisor had Slurm end it with the run's code.", ("exit_code", "how")
    ),
    "run_completed": Meaning("All ranks reached the end of their work.", ("step",)),
    "run_failed": Meaning("The run ended and will not be tried again.", ("cause", "by_hand", "reason", "exit_code")),
    # nodes and their agents
    "agent_joined": Meaning("A node's agent connected.", ("node", "pid", "boot_id", "warm", "again", "reason")),
    "agent_warm": Meaning("A node can fork ranks, or cannot and why.", ("node", "warm", "reason", "took_s")),
    "agent_start_failed": Meaning("No agent came up on a node.", ("node", "exit_code", "detail", "times")),
    "agent_refused": Meaning("An agent did not obey.", ("node", "what", "why")),
    "agent_lost": Meaning("A node's agent is gone or silent.", ("node", "why", "since")),
    "agents_left_behind": Meaning("Agents could not be told that the run ends here.", ("nodes",)),
    "node_drained": Meaning("Somebody has drained a node under the job.", ("node", "reason", "policy")),
    "node_undrained": Meaning("A node of the job is in service again.", ("node",)),
    "node_forgiven": Meaning("A user has taken a node back: what crashed there so far is held against it no more.", ("node",)),
    "node_check_started": Meaning("The nodes are checked before the next attempt.", ("nodes", "reason")),
    "node_check_done": Meaning(
        "What a check found: suspects, and of each node the seconds alone and with each of two partners (null: failed).",
        ("nodes", "suspects", "inconclusive", "times", "seconds"),
    ),
    "node_gone": Meaning("Slurm took a node out of the job.", ("node", "why")),
    # attempts
    "attempt_started": Meaning("All ranks are about to be launched with this plan.", ("nodes", "world", "plan")),
    "attempt_adopted": Meaning("A restarted supervisor found the attempt alive and lets it go on.", ("nodes", "world")),
    "store_failed": Meaning("c10d's store could not be hosted for the ranks.", ("node", "detail")),
    "launched_cold": Meaning("A node's ranks were not forked but started anew.", ("node", "reason")),
    "ranks_launched": Meaning("Every node has started its ranks.", ("world", "warm", "seconds", "pids")),
    "rank_exited_early": Meaning("A rank ended with code 0 before its work was done.", ("node", "rank", "step")),
    "died_at_exit": Meaning(
        "A rank died of a signal in the teardown of its interpreter, when its script had ended and its work was saved: that "
        "counts as an end with code 0.",
        ("node", "rank", "step", "signal", "tail"),
    ),
    "lingered": Meaning(
        "The run was complete, and ranks did nothing for so long without ending: they are killed, and it counts as complete.",
        ("ranks", "quiet_s"),
    ),
    "left_unfinished": Meaning(
        "All ranks ended with code 0 in the middle of run.steps(), without run.finish(): the run counts as complete, and what "
        "was done since its last checkpoint is saved nowhere.",
        ("step", "ranks"),
    ),
    "limits_set": Meaning(
        "How many seconds each kind of work may be silent from now on, learned from the longest silences seen; '(start)' is "
        "for what has not been seen often enough.",
        ("limits", "seen", "world"),
    ),
    "straggler_found": Meaning(
        "A rank is steadily slower than the middle of the others, in what a step costs it by itself.",
        ("node", "rank", "own_s", "others_s", "times", "whole_node"),
    ),
    "straggler_recovered": Meaning(
        "A rank that was slower is so no more.", ("node", "rank", "own_s", "others_s", "times", "whole_node")
    ),
    "watched_from_outside": Meaning(
        "No rank says how far it is: only exits, CPU, reading and writing are watched.", ("ranks", "quiet_limit_s")
    ),
    "rank_quiet": Meaning("A rank that never said a word shows no life from outside either.", ("node", "rank", "quiet_s")),
    "stop_not_heard": Meaning(
        "Ranks were asked to stop a while ago, and none has answered or come to the end of a step: nobody asks "
        "run.should_stop() in there.",
        ("waited_s", "rank", "section", "section_s"),
    ),
    "stop_deadline_passed": Meaning("Ranks did not end in the time that they had.", ("ended", "saved", "world")),
    "attempt_stopped": Meaning(
        "Nothing of the attempt is alive on the nodes that can be reached.",
        ("fault", "cause", "by_hand", "signature", "signal", "saved", "step", "node", "rank", "detail"),
    ),
    "fact_received": Meaning("A rank said something that only the supervisor may say.", ("node", "rank", "kind")),
    # faults and decisions
    "fault_detected": Meaning("Something ended the attempt.", ("cause", "node", "rank", "detail", "since", "step")),
    "warning_received": Meaning("A warning signal came.", ("signal", "source", "deadline", "again")),
    "warning_explained": Meaning(
        "Why it came, as Slurm says; by_hand: who or what has put the job back into the queue, where somebody did (then the "
        "cause is unknown, and it is no incident).",
        ("cause", "by_hand", "detail", "requeued", "deadline"),
    ),
    "decided": Meaning("What the supervisor does about it, and why.", ("action", "reason", "cause", "by_hand")),
    "requeue_started": Meaning("Slurm is asked to queue the job again.", ("nodes", "lost")),
    "requeue_done": Meaning("Slurm has queued the job again."),
    "requeue_failed": Meaning("Slurm could not be brought to queue the job again."),
}

FROM_RANKS: dict[str, Meaning] = {
    "resumed": Meaning(
        "A checkpoint was loaded.", ("step", "checkpoint", "seconds", "verify_s", "world", "rng", "tier", "ranks")
    ),
    "started_fresh": Meaning(
        "There was no checkpoint; training starts at step 0, with the weights of a given file if one was.",
        ("ranks", "weights", "taken", "missing", "unused"),
    ),
    "learning_rate_scaled": Meaning(
        "As asked for by keep_accumulation, batch and learning rate follow the world.", ("rule", "factor", "global_batch")
    ),
    "first_step": Meaning("Every rank has completed its first step of the attempt.", ("step", "loss", "ranks")),
    "step_reported": Meaning("Progress of rank 0, thinned out.", ("step", "loss", "grad_norm", "lr", "samples")),
    "checkpoint_started": Meaning("A save began.", ("step",)),
    "checkpoint_committed": Meaning(
        "A save is complete and in the index; training stood still for a part of its seconds.",
        ("step", "name", "bytes", "seconds", "stall_s"),
    ),
    "checkpoint_failed": Meaning("A save was given up; the older ones stand.", ("step", "error")),
    "checkpoint_interval_chosen": Meaning("How often to save, as the run's own figures recommend.", ("interval_s", "reason")),
    "local_copy_failed": Meaning("A copy in a node's own memory could not be taken, or used.", ("step", "error")),
    "checkpoint_quarantined": Meaning("A checkpoint is not to be trusted; an older one is tried.", ("step", "name", "reason")),
    "checkpoint_passed_over": Meaning(
        "A newer checkpoint was left out at resume: it cannot be read, or attempts ended while they loaded it.",
        ("step", "name", "reason"),
    ),
    "first_steps_checked": Meaning(
        "The first steps after a resume were compared with what went before.", ("step", "checkpoint", "verdict", "reasons")
    ),
    "node_suspected": Meaning("Ranks that check each other's work disagree, bit by bit.", ("step", "nodes", "ranks", "why")),
    "replicas_differed": Meaning(
        "Ranks held different copies of the same state when it was saved.", ("step", "ranks", "tensors")
    ),
    "stopped": Meaning("Every rank has ended because it was asked to.", ("step", "why", "saved", "ranks")),
    "finished": Meaning("Every rank has reached the end of its work.", ("step", "outcome", "ranks")),
    "exception": Meaning("A rank's own code raised.", ("type", "message", "traceback", "step", "exit_code")),
    "phase_done": Meaning("A rank measured a part of its work.", ("name", "seconds")),
}

EVENTS: dict[str, Meaning] = {**FROM_SUPERVISOR, **FROM_RANKS}
