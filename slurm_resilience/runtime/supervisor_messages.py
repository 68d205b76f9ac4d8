"""What the supervisor says to an agent; the conversation is described in :mod:`messages`."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any, ClassVar

from slurm_resilience.runtime.agent_messages import Hello
from slurm_resilience.runtime.message import BEAT_EVERY_S, WIRE_VERSION, Message, proof_of


@dataclass(frozen=True)
class Welcome(Message):
    """The answer to a good hello; the agent obeys nothing before it.  ``beat_every_s``: how often it is to beat from now on."""

    kind: ClassVar[str] = "welcome"
    v: int
    proof: str
    beat_every_s: float = BEAT_EVERY_S

    @classmethod
    def build(cls, token: str, hello: Hello, *, beat_every_s: float = BEAT_EVERY_S) -> Welcome:
        """The answer that only somebody who knows the token can give to this hello."""
        return cls(v=WIRE_VERSION, proof=proof_of(token, "supervisor", hello.nonce, hello.node), beat_every_s=beat_every_s)

    def proves(self, token: str, hello: Hello) -> bool:
        """Whether the answer comes from somebody who knows the token."""
        return hmac.compare_digest(self.proof.encode(), proof_of(token, "supervisor", hello.nonce, hello.node).encode())


@dataclass(frozen=True)
class Ping(Message):
    """Answer every beat with one at once, with ``seen=connection.seen``; it renews the agent's lease."""

    kind: ClassVar[str] = "ping"
    seen: int

    def to_line(self) -> bytes:
        """The same line without the encoder: thousands a second are sent."""
        return b'{"m":"ping","seen":%d}\n' % self.seen


@dataclass(frozen=True)
class Store(Message):
    """Host the store of this attempt here.  Send it to the node of rank 0 before ``launch``."""

    kind: ClassVar[str] = "store"
    attempt: int


@dataclass(frozen=True)
class Launch(Message):
    """Start these ranks here.

    ``ranks``: ``[[rank, local_rank], …]``.  ``argv`` is the user's command as given after ``--``.  ``env``: variables on
    top of the agent's own environment (null removes one).  ``settings`` and ``plan``: see RankContract.  ``header``: the
    line that opens each rank's log.

    ``wait_warm``: let the launch wait until the launcher has finished its preload (one that may not fork then starts
    the ranks cold all the same); otherwise a launcher that is not warm yet means a cold start at once.
    ``store_hosted``: a ``store_ready`` gave ``master_port``; otherwise rank 0 makes c10d's store there by itself.
    """

    kind: ClassVar[str] = "launch"
    attempt: int
    world: int
    ranks: list[Any]
    group_rank: int
    groups: int
    master_addr: str
    master_port: int
    argv: list[str]
    cwd: str
    env: dict[str, Any]
    checkpoints: str
    settings: dict[str, Any]
    plan: dict[str, Any]
    header: str = ""
    wait_warm: bool = True
    store_hosted: bool = True


@dataclass(frozen=True)
class Order(Message):
    """Ask the ranks of the attempt to stop and/or to save.  ``save`` is a number that grows with each request.

    ``deadline`` is wall-clock seconds, null where there is none.  Only the pages are written; nobody is killed.
    """

    kind: ClassVar[str] = "order"
    attempt: int
    stop: bool
    save: int
    deadline: float | None
    cause: str


@dataclass(frozen=True)
class Kill(Message):
    """Kill everything of ``attempt`` and older.  With ``grace_s`` over 0, TERM goes first and KILL after that time.

    ``look``: what to look at before, and to tell by ``looked``: "node" (at once), "ranks" too (at most 1.5 s), "" for nothing.
    """

    kind: ClassVar[str] = "kill"
    attempt: int
    grace_s: float = 0.0
    look: str = ""


@dataclass(frozen=True)
class Hint(Message):
    """Leave a word for root's own checks on this node: what ended there, and when (wall clock)."""

    kind: ClassVar[str] = "hint"
    attempt: int
    cause: str
    at: float


@dataclass(frozen=True)
class Quit(Message):
    """Kill everything of this run on the node and end with exit code 0."""

    kind: ClassVar[str] = "quit"
    why: str = ""
