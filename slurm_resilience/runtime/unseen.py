"""Ranks that say nothing of themselves: what is known of them is little, which is said; and a long quiet is reported.

A program without a ``Run``, or one that hangs before its first word, is seen by its exits, its use of a processor, what it
reads and what it writes.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_resilience.config import LimitsConfig
from slurm_resilience.progress.sections import Phase
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.facts import Note
from slurm_resilience.runtime.hang import Hang

SAY_AFTER_S = 60.0


class Unseen:
    """Says each thing once an attempt."""

    def __init__(self) -> None:
        self._said = False
        self._quiet: set[int] = set()

    def look(
        self, ranks: Mapping[int, m.RankProgress], node_of: Mapping[int, str], limits: LimitsConfig, *, age_s: float
    ) -> tuple[list[Note], Hang | None]:
        """What is to be written, and the hang that it is when every rank is quiet for too long."""
        notes: list[Note] = []
        silent = {rank: each for rank, each in ranks.items() if not each.beats}
        if not self._said and age_s > SAY_AFTER_S and silent and len(silent) == len(ranks):
            self._said = True
            notes.append(("watched_from_outside", {"ranks": len(silent), "quiet_limit_s": limits.quiet_s}, None))
        early = {
            rank: each
            for rank, each in ranks.items()
            if not each.done and (not each.beats or (each.phase == Phase.INIT and each.step < 0))
        }
        quiet = {rank: each.quiet_s for rank, each in early.items() if each.quiet_s > limits.quiet_s}
        for rank in sorted(quiet.keys() - self._quiet):
            self._quiet.add(rank)
            notes.append(("rank_quiet", {"node": node_of[rank], "rank": rank, "quiet_s": round(quiet[rank], 1)}, None))
        if not limits.kill_quiet or not quiet or len(quiet) < len(ranks):
            return notes, None
        rank = min(quiet)
        why = (
            f"no rank has used a processor, read or written anything for {quiet[rank]:.0f} s (limit {limits.quiet_s:g} s), "
            "and none has ever said what it does"
        )
        return notes, Hang(rank, quiet[rank], why)


def linger_s(ranks: Mapping[int, m.RankProgress], limits: LimitsConfig) -> float | None:
    """For how long ranks that have all come to the end of their run do nothing and do not end, if that is too long.

    A thread that nobody stops, a process group that is not left: it would hold the job until its time limit.
    """
    if not ranks or not limits.kill_quiet or not all(each.done for each in ranks.values()):
        return None
    least_s = min(each.quiet_s for each in ranks.values())
    return least_s if least_s > limits.quiet_s else None
