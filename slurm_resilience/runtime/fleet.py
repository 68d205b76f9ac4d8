"""Which nodes can run ranks now, which may soon, and where may an old attempt still be alive?

The proof rule: a node is free of an attempt when an agent there has said so, or when the lease of an agent that we no
longer hear is over.  An agent counts its own, shorter limit from a beat that we have acknowledged (see ``messages``), so
by the end of our lease it has killed its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slurm_resilience.runtime.messages import Hello

# An agent whose connection broke dials again within this time, unless it is dead.
RECONNECT_S = 0.7
# After an absence of ours, agents have backed off, and dial again a little later.
_RECONNECT_LATE_S = 4.0
# A longer silence than this was one already before an absence of ours: agents beat at least once a second.
_USUAL_S = 1.5
# How long a replacement of a dead agent is worth waiting for, when there are enough nodes without it.
REPLACE_S = 20.0
_START_PAUSE_S = (0.0, 1.0, 3.0, 10.0, 30.0)
_STARTS_BEFORE_GIVING_UP = 3
# Trying to start an agent on a silent node is cheap, but it is most probably off or cut off.
_SILENT_PAUSE_S = 10.0


@dataclass
class Node:
    """One node as the supervisor sees it.  All times are the supervisor's monotonic clock.

    ``holds``: attempt → until when its processes may be alive there (None: until an agent says that they are gone).
    ``carrier``: what is to start the agent is still at it.  ``silent``: it was lost without a sign, as by a power-off or
    a cut.  ``expected_until``: an agent is awaited until then.
    """

    name: str
    conn: int | None = None
    pid: int = 0
    boot_id: str = ""
    address: str = ""
    warm: bool = False
    cold_reason: str = ""
    joined: bool = False
    heard: float = 0.0
    lost_at: float | None = None
    lost_wall: float = 0.0
    gap_at: float | None = None
    losses: int = 0
    silent: bool = False
    holds: dict[int, float | None] = field(default_factory=dict)
    carrier: bool = False
    started_at: float = float("-inf")
    failed_starts: int = 0
    failure: str = ""
    expected_until: float = float("-inf")
    gone: bool = False

    @property
    def connected(self) -> bool:
        return self.conn is not None

    @property
    def able(self) -> bool:
        """Its launcher has said what it can do."""
        return self.connected and (self.warm or bool(self.cold_reason))


class Fleet:
    """The nodes of one allocation, in Slurm's order."""

    def __init__(self, names: Iterable[str], *, now: float, lease_s: float, handshake_s: float, held: int = 0) -> None:
        self.nodes = {name: Node(name, heard=now, expected_until=now + handshake_s) for name in names}
        self._by_conn: dict[int, Node] = {}
        self._lenient_until = float("-inf")
        self._lease_s = lease_s
        self._handshake_s = handshake_s
        self._holding: set[str] = set(self.nodes) if held else set()
        if held:
            for node in self.nodes.values():
                node.holds[held] = now + lease_s

    def of_conn(self, conn: int) -> Node | None:
        """The node that speaks on this connection, None when another has taken its place."""
        node = self._by_conn.get(conn)
        return node if node is not None and node.conn == conn else None

    def join(self, conn: int, hello: Hello, now: float) -> int | None:
        """An agent said hello.  Returns the connection that it replaces, if there is one.

        What it says is alive is the truth about its node: an agent kills what an earlier one left there, and waits for
        the proof, before it dials.
        """
        node = self.nodes[hello.node]
        replaced = node.conn
        node.holds = {hello.attempt: None} if hello.ranks else {}
        self._holding.add(node.name)
        self._by_conn.pop(replaced or 0, None)
        self._by_conn[conn] = node
        node.conn, node.pid, node.boot_id, node.address = conn, hello.pid, hello.boot_id, hello.address
        node.heard, node.lost_at, node.gap_at, node.joined, node.silent = now, None, None, True, False
        node.failed_starts, node.failure, node.carrier = 0, "", False
        self.warmed(node, now, warm=hello.warm, cold_reason="")  # why not, it says in a message of its own once it knows
        return replaced

    def warmed(self, node: Node, now: float, *, warm: bool, cold_reason: str) -> None:
        """The launcher can fork ranks, or cannot and why; neither means that it is (again) on its way."""
        node.warm, node.cold_reason = warm, cold_reason
        node.expected_until = float("-inf") if node.able else now + self._handshake_s

    def part(self, node: Node, now: float, *, expected: bool) -> None:
        """The connection broke.  Unless that was ``expected``, the node is lost when nobody dials again within RECONNECT_S."""
        node.conn = None
        node.gap_at = None if expected else now

    def lose(self, node: Node, now: float, *, since_wall: float, silent: bool) -> None:
        """The node counts as lost; what runs there may be alive until the lease is over.

        After a ``silent`` loss nothing is awaited from it: the agent dials again by itself if the network comes back.
        """
        node.silent = silent
        node.conn, node.gap_at, node.lost_at, node.lost_wall = None, None, now, since_wall
        node.losses += 1
        node.warm, node.cold_reason, node.expected_until = False, "", float("-inf")
        self._start_leases(node)

    def overdue(self, now: float) -> list[tuple[Node, str, bool]]:
        """Nodes that have to be called lost now, with the reason, and whether they went silently."""
        out: list[tuple[Node, str, bool]] = []
        for node in self.nodes.values():
            if node.connected and now - node.heard > self._lease_s:
                out.append((node, f"silent for {now - node.heard:.1f} s", True))
            elif node.gap_at is not None and now - node.gap_at > RECONNECT_S and now > self._lenient_until:
                out.append((node, "its agent's connection ended", False))
        return out

    def hold(self, names: Iterable[str], attempt: int) -> None:
        """Ranks of ``attempt`` are about to be started there."""
        for name in names:
            self.nodes[name].holds[attempt] = None
            self._holding.add(name)

    def release(self, node: Node, attempt: int) -> None:
        """Its agent says that nothing of ``attempt`` or older is alive."""
        node.holds = {number: until for number, until in node.holds.items() if number > attempt}

    def free(self, node: Node, now: float) -> bool:
        """Nothing of any attempt can be alive there."""
        node.holds = {number: until for number, until in node.holds.items() if until is None or until > now}
        return not node.holds

    def clear(self, now: float) -> bool:
        """Nothing of any attempt can be alive anywhere.  Cheap, however often it is asked while thousands stop."""
        while self._holding:
            name = next(iter(self._holding))
            if not self.free(self.nodes[name], now):
                return False
            self._holding.discard(name)
        return True

    def forget_silence(self, now: float, away_s: float) -> None:
        """We were not looking for so long: nobody's silence in that time counts, nor any before it that was short."""
        self._lenient_until = now + _RECONNECT_LATE_S
        for node in self.nodes.values():
            before_s = now - away_s - node.heard
            node.heard = max(node.heard, now - before_s if before_s > _USUAL_S else now)
            if node.gap_at is not None:
                node.gap_at = now

    def ready(self, now: float, *, need_warm: bool) -> tuple[str, ...]:
        """Nodes that could start ranks this instant."""
        return tuple(
            node.name
            for node in self.nodes.values()
            if node.connected and not node.gone and (node.able or not need_warm) and self.free(node, now)
        )

    def coming(self, now: float, *, need_warm: bool) -> tuple[str, ...]:
        """Nodes that are starting or warming up, and not yet given up."""
        ready = set(self.ready(now, need_warm=need_warm))
        return tuple(
            node.name
            for node in self.nodes.values()
            if node.name not in ready
            and not node.gone
            and now < node.expected_until
            and node.failed_starts < _STARTS_BEFORE_GIVING_UP
        )

    def remove_all_but(self, names: Iterable[str]) -> list[str]:
        """Slurm's list of the job's nodes: those that are not on it any more are gone for good.  Returns the newly gone."""
        kept = set(names)
        gone = [node for node in self.nodes.values() if node.name not in kept and not node.gone]
        for node in gone:
            node.gone = True
        return [node.name for node in gone]

    def lost(self) -> tuple[str, ...]:
        """Nodes without an agent, whether or not Slurm still counts them."""
        return tuple(node.name for node in self.nodes.values() if not node.connected and (node.joined or node.gone))

    def returning(self) -> tuple[str, ...]:
        """Lost nodes that the allocation still has."""
        return tuple(node.name for node in self.nodes.values() if node.lost_at is not None and not node.gone)

    def failures(self) -> str:
        """Why agents could not be started, "" when nothing is known."""
        return "; ".join(f"{node.name}: {node.failure}" for node in self.nodes.values() if node.failure)

    def to_start(self, now: float) -> list[Node]:
        """Nodes that need an agent started now.  While what carried the last one is alive, its end is awaited first."""
        out = []
        for node in self.nodes.values():
            if node.connected or node.gone or node.gap_at is not None:
                continue
            pause = _START_PAUSE_S[min(node.failed_starts + max(0, node.losses - 1), len(_START_PAUSE_S) - 1)]
            if node.silent and node.lost_at is not None and now - node.lost_at < _SILENT_PAUSE_S:
                continue
            if not node.carrier and now - node.started_at >= pause:
                out.append(node)
        return out

    def starting(self, node: Node, now: float) -> None:
        """A new agent is being started there."""
        node.carrier, node.started_at = True, now
        if node.joined and not node.silent:
            node.expected_until = now + REPLACE_S

    def carrier_ended(self, node: Node, why: str) -> None:
        """What had started the agent is gone; that alone says nothing about the agent."""
        node.carrier = False
        if not node.connected and node.gap_at is None and node.started_at > (node.lost_at or float("-inf")):
            node.failed_starts += 1
            node.failure = why

    def _start_leases(self, node: Node) -> None:
        until = node.heard + self._lease_s
        node.holds = {number: until if end is None else min(end, until) for number, end in node.holds.items()}
