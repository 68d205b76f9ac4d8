"""Has somebody drained a node under the job, and what is to be done about it?

Slurm lets a running job go on there, and whoever drained the node expects it to leave or to fail: the ranks save and go
on without it while they still can.  Slurm is asked every half minute; a drain counts when it was seen twice, since a hook
that is over its budget takes its own back within seconds.  A Slurm that does not answer changes nothing, and a node of which
its answer says nothing stays what it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime.outbox import Outbox

ASK_EVERY_S = 25.0
LOOK_AGAIN_S = 5.0
# After so many moves away from one node it is not taken back in this allocation.
_MOST_MOVES = 2
_LONGEST_REASON = 200


@dataclass(frozen=True)
class Move:
    """Leave ``nodes``: to others of this allocation (``inside``), or into a new one."""

    nodes: tuple[str, ...]
    inside: bool
    reason: str


def decide_move(
    hit: Mapping[str, str], left: Sequence[str], *, fewest: int, fits: bool, can_requeue: bool, room: int | None
) -> Move | str:
    """What to do when nodes of the attempt (``hit``: name → reason) are drained; the sentence for why it stays, where it does.

    ``left``: the nodes of the allocation that are not drained and could run ranks, ``fits``: batch and mesh fit on them;
    ``room``: nodes outside of it on which Slurm would start this job, None when nobody knows.
    """
    why = "; ".join(f"{name} was drained: {reason}" for name, reason in hit.items())
    if len(left) >= fewest and fits:
        return Move(tuple(hit), True, f"{why}; {len(left)} nodes are left, at least {fewest} are needed")
    short = f"{why}; what is left is too little ({len(left)} nodes, at least {fewest} are needed)"
    if not can_requeue:
        return f"{short}, and the job cannot be requeued"
    if room is None:
        return f"{short}, and Slurm does not say whether there are others"
    if room + len(left) < fewest:
        return f"{short}, and the partition has {room} other nodes in service"
    return Move(tuple(hit), False, f"{short}: a new allocation is asked for")


class DrainWatch:
    """``policy``: checkpoint_and_move, warn or ignore.  Decides nothing by itself."""

    def __init__(self, outbox: Outbox, *, policy: str, asks: bool) -> None:
        self._outbox, self._policy, self._asks = outbox, policy, asks and policy != "ignore"
        self._open = False
        self._asked: frozenset[str] = frozenset()
        self._ask_at = outbox.now + LOOK_AGAIN_S
        self._suspects: set[str] = set()
        self._moves: Counter[str] = Counter()
        self.drained: dict[str, str] = {}
        self.room: int | None = None
        self._news = False
        self._stays = ""

    @property
    def moves(self) -> bool:
        return self._policy == "checkpoint_and_move"

    @property
    def has_news(self) -> bool:
        """Slurm has answered since the last :meth:`move`, some node is drained, and that matters here."""
        return self._news and self.moves and bool(self.drained)

    def tick(self, nodes: Sequence[str]) -> None:
        """Have Slurm asked when it is time; a question that is open is not asked again."""
        if self._asks and not self._open and self._outbox.now >= self._ask_at:
            self._open, self._asked = True, frozenset(nodes)
            self._outbox.put(i.LookAtNodes(tuple(nodes)))

    def said(self, it: i.NodesSeen) -> None:
        """The answer to the open question."""
        self._open = False
        self._ask_at = self._outbox.now + ASK_EVERY_S
        if not it.known:
            return
        self.room, self._news = it.room, True
        told = self._asked - it.untold
        for name in [name for name in self.drained if name in told and name not in it.drained]:
            del self.drained[name]
            self._outbox.record("node_undrained", node=name)
        for name, reason in it.drained.items():
            if name in self._suspects and name not in self.drained:
                self.drained[name] = " ".join(reason.split())[:_LONGEST_REASON]
                self._outbox.record("node_drained", node=name, reason=self.drained[name], policy=self._policy)
        self._suspects = set(it.drained) | (self._suspects - told)
        if self._suspects - set(self.drained):
            self._ask_at = self._outbox.now + LOOK_AGAIN_S

    def avoids(self, name: str) -> bool:
        """No ranks are to be started there if that can be helped."""
        return self.moves and (name in self.drained or self._moves[name] >= _MOST_MOVES)

    def without_drained(self, names: Sequence[str], *, fewest: int, can_requeue: bool) -> tuple[str, ...]:
        """Those to launch on: a drained one only where it cannot be done without and no other allocation is to be had."""
        rest = tuple(name for name in names if not self.avoids(name))
        somewhere = can_requeue and self.room is not None and self.room + len(rest) >= fewest
        return rest if len(rest) >= fewest or (somewhere and self.drained) else tuple(names)

    def move(
        self, mine: Sequence[str], ready: Sequence[str], *, fewest: int, fits: Callable[[list[str]], bool], can_requeue: bool
    ) -> Move | str | None:
        """The move to make now, or why there is none, once each; None for nothing new.  ``ready``: idle nodes that we have."""
        hit = {name: self.drained[name] for name in mine if name in self.drained}
        if not self.moves or not hit or not self._news:
            return None
        self._news = False
        left = [name for name in dict.fromkeys((*mine, *ready)) if name not in self.drained]
        inside = len(left) >= fewest and fits(left)
        decided = decide_move(hit, left, fewest=fewest, fits=inside, can_requeue=can_requeue, room=self.room)
        if isinstance(decided, str):
            stays, self._stays = self._stays, decided
            return decided if decided != stays else None
        self._moves.update(decided.nodes)
        return decided
