"""Takes this node out of service, within the budget, never over anybody else's reason, and takes it back when it was too much.

read → flag → wait a little → read → decide → write → wait until slurmctld's second is over → read back → keep or undo
"""

import os
import time

from . import budget, files, ledger, slurm
from . import reason as reasons
from .checks import DRAIN_NOW
from .nodes import seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .checks import Result
    from .nodes import Node
    from .world import World

OWN = "drain.json"
PENDING = "pending.json"
DECISIONS = "decisions.json"
BUDGET = "budget.json"
LOCK = "drain.lock"
STANDS = "drained by us"
KEPT = ("pending", budget.LEAVE)  # outcomes after which the verdict waits for a better moment


class Outcome:
    """What became of the wish to drain: ``kind`` is one of budget's words, or pending or undone."""

    def __init__(self, kind: str, why: str, reason: str = "") -> None:
        self.kind = kind
        self.why = why
        self.reason = reason


def limits(world: "World") -> "dict[str, float]":
    """The budget as configured, with defaults for what is not."""
    return {name: world.number("budget", name, default) for name, default in budget.DEFAULTS.items()}


def drain(world: "World", result: "Result") -> Outcome:
    """Drain this node for a failed check, or say why not.  Whatever happens is recorded; nothing is raised."""
    try:
        outcome = _one_at_a_time(world, result)
    except slurm.NoAnswer as error:
        _keep_for_later(world, result, str(error))
        outcome = Outcome("pending", str(error))
    except slurm.Refused as error:
        outcome = Outcome("refused", str(error))
    if outcome.why == STANDS:
        return outcome  # no news
    ledger.record(
        world, "drained" if outcome.kind == budget.GRANTED else "not_drained", check=result.check, word=result.word,
        decision=outcome.kind, why=outcome.why, reason=outcome.reason, evidence=result.text, severity=result.severity,
    )  # fmt: skip
    _count(world, outcome.kind)
    if outcome.kind == budget.GRANTED and result.severity == DRAIN_NOW:
        from . import evict

        evict.requeue_jobs(world)
    return outcome


def _one_at_a_time(world: "World", result: "Result") -> Outcome:
    """Two jobs that end in the same second find the same fault: the second one must not replace what the first remembers."""
    lock = files.Lock(world.path(LOCK))
    if not lock.acquire(max(0.0, min(5.0, world.deadline - time.monotonic() - 2.0))):
        _keep_for_later(world, result, "somebody else drains this node")
        return Outcome("pending", "another hook on this node is just draining or returning it")
    try:
        if stands(world):
            return Outcome(budget.ALREADY, STANDS)
        return _drain(world, result)
    finally:
        lock.release()


def stands(world: "World") -> bool:
    """Is the drain that we remember still there?  One that somebody has taken away is forgotten.  Raises slurm.NoAnswer."""
    remembered = own(world)
    if not remembered.get("confirmed"):
        return False
    node = slurm.this_node(slurm.all_nodes(world), world.node)
    if node is not None and node.drained and not is_ours(node, remembered):
        return True
    why = is_ours(node, remembered) if node is not None and node.drained else "the node is not drained any more"
    forget(world)
    ledger.record(world, "drain_gone", why=why, reason=remembered.get("reason"))
    return False


def _count(world: "World", kind: str) -> None:
    """For the metrics: how often each decision was made."""
    counts = files.read_json(world.path(DECISIONS))
    counts[kind] = files.integer(counts.get(kind)) + 1
    try:
        files.write_json(world.path(DECISIONS), counts)
    except OSError:
        return  # a full disk; the ledger has said so


def _note_budget(world: "World", seen: "list[Node]") -> None:
    """For the metrics: the budget as it was when all nodes were last looked at."""
    wanted = limits(world)
    most = budget.allowed(len(seen), wanted["max_nodes"], wanted["max_percent"])
    out = sum(1 for node in seen if node.out)
    try:
        files.write_json(world.path(BUDGET), {"nodes": len(seen), "out": out, "allowed": most, "at": time.time()})
    except OSError:
        return


def _drain(world: "World", result: "Result") -> Outcome:
    now = time.time()
    flag(world, result.check, now, result.text)
    time.sleep(int.from_bytes(os.urandom(2), "big") / 65536.0 * world.number("budget", "jitter_s", 0.3))
    seen = slurm.all_nodes(world)
    _note_budget(world, seen)
    decision = budget.decide(seen, world.node, result.check, limits(world), now)
    if decision.kind == budget.LEAVE:
        _keep_for_later(world, result, decision.why)
    if not decision.granted:
        return Outcome(decision.kind, decision.why)
    at = time.time()
    text = f"{result.blame}: {result.text}"
    reason = reasons.compose(result.check, result.word, result.where, world.job.id, at, world.boot, text)
    remember(world, {"reason": reason, "check": result.check, "at": at, "boot": world.boot, "steady": time.monotonic(),
                     "confirmed": False})  # fmt: skip
    slurm.update(world, "State=DRAIN", "Reason=" + reason)
    files.remove(world.path(PENDING))
    return confirm(world)


def confirm(world: "World") -> Outcome:
    """Is our own drain there, and may it stay?  Undoes it when it is beyond the budget.  Raises NoAnswer."""
    own = files.read_json(world.path(OWN))
    reason, check = str(own.get("reason", "")), str(own.get("check", ""))
    time.sleep(min(slurm.SETTLE_S, world.remaining(slurm.SETTLE_S)))
    foreign = wiped(world, files.number(own.get("at")), reason)
    if foreign:
        give_back(world, foreign)
    seen = slurm.all_nodes(world)
    _note_budget(world, seen)
    node = slurm.this_node(seen, world.node)
    if node is None or node.reason != reason:
        forget(world)
        return Outcome(budget.FOREIGN, "another reason stands there now: {}".format(node.reason if node else "no such node"))
    # By slurmctld's clock, by which the drains of all nodes are dated: a node whose own is wrong must not see an empty window
    decision = budget.confirm(seen, world.node, check, limits(world), node.since or time.time())
    if decision.granted:
        own.update({"confirmed": True, "since": node.since, "user": node.user})
        remember(world, own)
        return Outcome(budget.GRANTED, decision.why, reason)
    if decision.kind in (budget.SPENT, budget.CORRELATED) and not node.untouchable:
        at = time.time()
        slurm.put_back(world)
        forget(world)
        if world.section("slurm").get("accounting"):
            time.sleep(min(slurm.SETTLE_S, world.remaining(slurm.SETTLE_S)))
            foreign = wiped(world, at, reason)
            if foreign:
                give_back(world, foreign)
        return Outcome(decision.kind, f"taken back: {decision.why}", reason)
    return Outcome(decision.kind, decision.why, reason)


def wiped(world: "World", at: float, ours: str) -> "dict[str, str] | None":
    """A drain of somebody else's that our own writing at this time wiped; None for none, or where no accounting tells.

    Slurm has no compare-and-swap.  What ended in the second of our write was ended by it; a drain that an admin set and
    took back himself was not.
    """
    try:
        events = slurm.drains_since(world, int(at) - 2)
    except slurm.NoAnswer as error:
        ledger.record(world, "accounting_unknown", why=str(error))
        return None
    foreign = [event for event in events if event["reason"].strip() and event["reason"] != ours]
    foreign = [event for event in foreign if not reasons.parse(event["reason"])]
    foreign = [event for event in foreign if abs(seconds(event["until"]) - at) <= 2.0]
    return foreign[-1] if foreign else None


def give_back(world: "World", foreign: "dict[str, str]") -> None:
    """Set somebody's drain again, in his words."""
    slurm.update(world, "State=DRAIN", "Reason=" + foreign["reason"])
    ledger.record(world, "foreign_drain_restored", reason=foreign["reason"], user=foreign.get("user", ""))


def flag(world: "World", check: str, now: float, text: str) -> None:
    """The node's comment says that this check failed: other nodes count it, admins see it.  Foreign text in it stays."""
    node = slurm.this_node(slurm.all_nodes(world), world.node)
    if node is not None:
        slurm.update(world, "Comment=" + reasons.with_note(node.comment, "flag", check, now, text))


def unflag(world: "World", check: str) -> None:
    """The comment says so no longer."""
    node = slurm.this_node(slurm.all_nodes(world), world.node)
    if node is not None and any(note.kind == "flag" and note.what == check for note in node.notes):
        slurm.update(world, "Comment=" + reasons.without_note(node.comment, "flag", check))


def own(world: "World") -> "dict[str, object]":
    """Our drain of this node as we remember it; {} when there is none."""
    return files.read_json(world.path(OWN))


def remember(world: "World", what: "dict[str, object]") -> None:
    files.write_json(world.path(OWN), what, sync=True)


def forget(world: "World") -> None:
    files.remove(world.path(OWN))


def pending(world: "World") -> "dict[str, object]":
    """A verdict that could not be acted on yet."""
    return files.read_json(world.path(PENDING))


def _keep_for_later(world: "World", result: "Result", why: str) -> None:
    entry = result.to_dict()
    entry.update({"at": time.time(), "boot": world.boot, "why": why, "job": world.job.id})
    try:
        files.write_json(world.path(PENDING), entry, sync=True)
    except OSError as error:
        ledger.record(world, "own_error", error=f"cannot keep the verdict: {error}")


def is_ours(node: "Node", remembered: "dict[str, object]") -> str:
    """Why this drain is not the one that we set and remember; "" when it is, to the letter, the user and the second."""
    if not remembered:
        return "we remember no drain of ours"
    if node.reason != remembered.get("reason"):
        return f"the reason is another one: {node.reason}"
    if remembered.get("user") and node.user != remembered["user"]:
        return "the drain is {}'s, not {}'s".format(node.user, remembered["user"])
    if remembered.get("since") and node.since != remembered["since"]:
        return "the drain was set again at another time"
    return ""
