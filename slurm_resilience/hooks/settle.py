"""What follows from the checks' answers: nothing, a record, a mark in the comment, or one wish to drain.

Unknown never drains.  What the job is to blame for never drains.  A check in observe mode says what it would have done.
"""

import time

from . import files, ledger
from .checks import DRAIN_NOW, FAIL, FLAG, JOB, OK, Result

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import drain
    from .engine import Plan
    from .world import World


FLAGS = "flags.json"


def wish(plan: "Plan", result: Result, fails: int) -> str:
    """off, observe, comment or drain: what this answer asks for.  Pure."""
    if result.status != FAIL or fails < plan.after_fails:
        return "off"
    if plan.mode == "drain" and (result.blame == JOB or result.severity == FLAG):
        return "comment"
    return plan.mode


def settle(
    world: "World", chosen: "list[Plan]", results: "list[Result]", told: "dict[str, dict[str, object]]"
) -> "drain.Outcome | None":
    """Act on the answers, the worst first, with one drain at most; what became of it."""
    wishes = {}  # type: dict[str, list[Result]]
    by_name = {plan.name: plan for plan in chosen}
    for result in results:
        entry = told.get(result.check, {})
        asked = wish(by_name[result.check], result, files.integer(entry.get("fails"), 1))
        wishes.setdefault(asked, []).append(result)
    for result in wishes.get("observe", []):
        ledger.record(world, "would_drain", check=result.check, word=result.word, text=result.text, blame=result.blame)
    worst = sorted(wishes.get("drain", []), key=lambda result: result.severity != DRAIN_NOW)
    flagged = files.read_json(world.path(FLAGS))
    for result in wishes.get("comment", []) + worst[1:]:
        if result.check not in flagged:
            mark(world, result)
    for result in results:
        if result.status == OK and result.check in flagged:
            unmark(world, result.check)
    if not worst:
        return None
    from . import drain  # a clean node never needs it

    outcome = drain.drain(world, worst[0])
    _remember(world, worst[0].check, True)
    return outcome


def mark(world: "World", result: Result) -> None:
    """Flag the node in its comment, once.  Without an answer from Slurm it is tried again with the next failure."""
    ledger.record(world, "flagged", check=result.check, word=result.word, text=result.text, blame=result.blame)
    from . import drain, slurm

    try:
        drain.flag(world, result.check, time.time(), result.text)
        _remember(world, result.check, True)
    except (slurm.NoAnswer, slurm.Refused) as error:
        ledger.record(world, "flag_failed", check=result.check, why=str(error))


def unmark(world: "World", check: str) -> None:
    """The check passes: its flag goes."""
    from . import drain, slurm

    try:
        drain.unflag(world, check)
        _remember(world, check, False)
        ledger.record(world, "unflagged", check=check)
    except (slurm.NoAnswer, slurm.Refused) as error:
        ledger.record(world, "flag_failed", check=check, why=str(error))


def _remember(world: "World", check: str, flagged: bool) -> None:
    marks = files.read_json(world.path(FLAGS))
    marks.pop(check, None)
    if flagged:
        marks[check] = time.time()
    try:
        files.write_json(world.path(FLAGS), marks)
    except OSError as error:
        ledger.record(world, "own_error", error=f"cannot keep the flags: {error}")
