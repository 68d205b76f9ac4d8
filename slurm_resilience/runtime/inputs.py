"""What the coordinator hears, and what it wants done: plain values, so that every transition can be tested without I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slurm_resilience.runtime.messages import Hello, Message
from slurm_resilience.runtime.run_folder import RunStatus
from slurm_resilience.slurm.cause import Verdict

# --- what it hears ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """Time has passed.  Comes first in every round of the loop, so that a jump of our own clock is seen before anything,
    and last, when all that came is known.
    """


@dataclass(frozen=True)
class Joined:
    """An agent proved itself on a new connection."""

    conn: int
    hello: Hello


@dataclass(frozen=True)
class Heard:
    """A message of an agent."""

    conn: int
    message: Message


@dataclass(frozen=True)
class Parted:
    """A connection ended."""

    conn: int
    why: str


@dataclass(frozen=True)
class CarrierEnded:
    """The process that had started the agent (srun, or the agent itself) ended.  ``tail``: its last words."""

    node: str
    code: int
    tail: str


@dataclass(frozen=True)
class AttemptWritten:
    """The attempt number is durable: older ones are fenced from here on."""

    number: int


@dataclass(frozen=True)
class SlurmSaid:
    """The answer to :class:`AskSlurm`."""

    verdict: Verdict


@dataclass(frozen=True)
class NodesSeen:
    """The answer to :class:`LookAtNodes`: name → reason of those that are drained.

    ``known``: Slurm has answered; ``room``: nodes outside of the allocation that are in service in the job's partition,
    looked at only when one is drained, None when nobody knows; ``maintenance_at``: when one begins on our nodes; ``untold``:
    those that were asked about and that the answer says nothing of.
    """

    drained: dict[str, str]
    known: bool = True
    room: int | None = None
    maintenance_at: float | None = None
    untold: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Signalled:
    """The supervisor itself got a signal."""

    signal: str
    t: float


@dataclass(frozen=True)
class RequeueEnded:
    """The recipe ran to its end; ``fields`` go into the event."""

    ok: bool
    reason: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Superseded:
    """Another supervisor has announced itself in the run folder."""

    epoch: int


@dataclass(frozen=True)
class Forgiven:
    """The user takes a node back: what crashed there so far is not held against it any more."""

    node: str


Input = (
    Tick | Joined | Heard | Parted | CarrierEnded | AttemptWritten | SlurmSaid | NodesSeen | Signalled | RequeueEnded
    | Superseded | Forgiven
)  # fmt: skip


# --- what it wants ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Say something to an agent."""

    conn: int
    message: Message


@dataclass(frozen=True)
class Drop:
    """Give a connection up.  With ``quit`` its agent is told to end; otherwise it may dial again."""

    conn: int
    why: str
    quit: bool = False


@dataclass(frozen=True)
class Record:
    """Append an event."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)
    t: float = 0.0
    attempt: int = 0


@dataclass(frozen=True)
class WriteAttempt:
    """Make the attempt number durable; answered by :class:`AttemptWritten`."""

    number: int


@dataclass(frozen=True)
class WriteStatus:
    """Write ``state.json``."""

    status: RunStatus


@dataclass(frozen=True)
class WriteLive:
    """Write ``live.json``; one that cannot be written is forgotten."""

    document: dict[str, Any]


@dataclass(frozen=True)
class WriteIncident:
    """Write the record of the fault that ended an attempt."""

    attempt: int
    record: dict[str, Any]


@dataclass(frozen=True)
class StartAgent:
    """Start an agent there; its carrier's end is answered by :class:`CarrierEnded`."""

    node: str


@dataclass(frozen=True)
class AskSlurm:
    """Ask why the job ends, if it does; answered by :class:`SlurmSaid`.  ``heard_at``: wall clock of the warning."""

    heard_at: float


@dataclass(frozen=True)
class LookAtNodes:
    """Ask whether somebody has drained one of these; answered by :class:`NodesSeen`."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Requeue:
    """Run the recipe for (fewest, most) ``nodes``, None for what the job asked for; answered by :class:`RequeueEnded`.

    ``lost``: nodes that have no agent, and the wall-clock time when they were last heard.  ``suspects``: nodes that crashes
    followed; the next allocation had better be without them, too.
    """

    nodes: tuple[int, int] | None
    lost: dict[str, float]
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finish:
    """All is done; end with this code."""

    exit_code: int


Output = (
    Send
    | Drop
    | Record
    | WriteAttempt
    | WriteStatus
    | WriteLive
    | WriteIncident
    | StartAgent
    | AskSlurm
    | LookAtNodes
    | Requeue
    | Finish
)
