"""Runs the checks of one context at the same time, each in a child that can be killed, and keeps what they said.

A check that hangs, crashes or answers garbage is "unknown"; so is a site's own that nobody but root may have written.
"""

import json
import os
import time

from . import checks, child, files, ledger
from .checks import FAIL, OK, UNKNOWN, WARN, Result

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .world import Job, World

VERDICT = "verdict.json"
SITE_STATUS = {0: OK, 1: WARN, 2: FAIL, 3: UNKNOWN}
# Read a few short files of the kernel's and nothing else
QUICK = ("cpu", "leftovers", "memory", "memory_errors", "tmpfiles")
QUICK_S = 1.0
PROMISED = {"cpu": "count", "memory": "real_memory_mb"}  # options that slurm.conf gives where the site does not
MODES = ("off", "observe", "comment", "drain")


class Plan:
    """One check as configured for this node."""

    def __init__(self, name: str, entry: "dict[str, object]") -> None:
        self.name = name
        self.mode = str(entry.get("mode", "observe"))
        contexts = entry.get("contexts")
        self.contexts = [str(context) for context in contexts] if isinstance(contexts, list) else []
        self.timeout_s = _number(entry.get("timeout_s"), 5.0)
        self.severity = str(entry.get("severity", checks.DRAIN_AFTER))
        self.after_fails = int(_number(entry.get("after_fails"), 1))
        options = entry.get("options")
        self.options = options if isinstance(options, dict) else {}  # type: dict[str, object]
        self.command = str(entry.get("command", ""))  # a site check
        self.blame = str(entry.get("blame", checks.NODE))


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) else default


def plans(world: "World", context: str) -> "list[Plan]":
    """The checks that are on for this node in this context; a hint from a job brings the periodic ones in too."""
    found = []
    for name, entry in sorted(world.section("checks").items()):
        if not isinstance(entry, dict):
            continue
        merged = dict(entry)
        for rule in entry.get("nodes", []):
            if matches(str(rule.get("match", "")), world.node):
                options = dict(merged.get("options", {}))
                options.update(rule.get("options", {}))
                merged["options"] = options
                merged.update({key: value for key, value in rule.items() if key in ("mode", "severity", "after_fails")})
        plan = Plan(name, merged)
        if name in PROMISED and PROMISED[name] not in plan.options:
            plan.options = dict(plan.options, **promise(world, PROMISED[name]))
        if plan.mode in MODES[1:] and (context in plan.contexts or context == "all"):
            found.append(plan)
    return found


def promise(world: "World", key: str) -> "dict[str, object]":
    """What slurm.conf promised of this node when the configuration was compiled; {} when it is another one by now."""
    told = world.section("promised")
    rules = told.get("rules")
    for rule in reversed(rules) if isinstance(rules, list) else []:
        if key in rule and matches(str(rule["match"]), world.node):
            try:
                same = crc_of_nodes(files.read(str(told["conf"]))) == told.get("crc")
            except OSError:
                same = True  # no file of its own here: a configless node, or the compiled configuration came from elsewhere
            return {key: rule[key]} if same else {}
    return {}


def crc_of_nodes(text: str) -> int:
    """The checksum of what a slurm.conf says of nodes, whatever else changes in it."""
    import binascii

    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if line[:8].lower() == "nodename" or line[:7].lower() == "include"]
    return binascii.crc32("\n".join(lines).encode("utf-8", "replace"))


def matches(pattern: str, node: str) -> bool:
    """``n[1-3,07]``, ``gpu*`` or a plain name, and lists of these with commas outside of brackets."""
    import re

    if "[" not in pattern and "*" not in pattern:  # one of thousands of lines, each for one node
        return node in pattern.split(",") and bool(node)
    return any(_fits(part, node) for part in re.findall(r"(?:\[[^\]]*\]|[^\[\],])+", pattern))


def _fits(pattern: str, name: str) -> bool:
    """One pattern against the whole name.  A range of any length costs two comparisons."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(_fits(pattern[1:], name[at:]) for at in range(len(name) + 1))
    if pattern[0] != "[":
        return name[:1] == pattern[0] and _fits(pattern[1:], name[1:])
    inside, _, rest = pattern[1:].partition("]")
    digits = 0
    while digits < len(name) and "0" <= name[digits] <= "9":
        digits += 1
        if _fits(rest, name[digits:]) and any(_in_range(piece, name[:digits]) for piece in inside.split(",")):
            return True
    return False


def _in_range(piece: str, digits: str) -> bool:
    low, dash, high = piece.partition("-")
    if not dash:
        return low == digits
    if not (low.isdigit() and high.isdigit()) or not int(low) <= int(digits) <= int(high):
        return False
    return digits == str(int(digits)).zfill(len(low))


def run(world: "World", chosen: "list[Plan]", job: "Job | None" = None, root: str = "") -> "list[Result]":
    """The answers of these checks, after at most the longest of their times.

    Those that only read the kernel's files share one child, since on a healthy node forking is most of the cost; when that
    child hangs or dies, each of them that has not answered is asked again in a child of its own.
    """
    asked = {plan.name: _ask(world, plan, time.monotonic() + world.remaining(plan.timeout_s), job or world.job, root)
             for plan in chosen}  # fmt: skip
    quick = [plan for plan in chosen if plan.name in QUICK and not plan.command]
    alone = [plan for plan in chosen if plan not in quick] if len(quick) > 1 else chosen
    started = [(plan, world.remaining(plan.timeout_s), child.start(asked[plan.name], plan.name)) for plan in alone]
    told = _together(quick, asked) if len(quick) > 1 else {}
    for plan in quick if len(quick) > 1 else []:
        if plan.name not in told:
            again = _ask(world, plan, time.monotonic() + world.remaining(plan.timeout_s), job or world.job, root)
            started.append((plan, world.remaining(plan.timeout_s), child.start(again, plan.name)))
    for plan, limit, running in started:
        told[plan.name] = _answer(plan, running.finish(limit))
    return [told[plan.name] for plan in chosen]


def _together(quick: "list[Plan]", asked: "dict[str, Callable[[], str]]") -> "dict[str, Result]":
    """The answers that came from one child within a second; a check that raised, or came after one that hung, has none."""

    def all_of_them() -> str:
        for plan in quick:
            os.write(1, (asked[plan.name]() + "\n").encode("utf-8", "replace"))
        return ""

    done = child.start(all_of_them, "quick checks").finish(QUICK_S)
    found = {}
    for plan, line in zip(quick, done.out.splitlines()):  # noqa: B905  as far as it came
        try:
            json.loads(line)
        except ValueError:
            break
        found[plan.name] = _answer(plan, child.Finished(0, line, "", "", False))
    return found


def _ask(world: "World", plan: Plan, deadline: float, job: "Job", root: str) -> "Callable[[], str]":
    def function() -> str:
        started = time.monotonic()
        child.bound_memory()
        if plan.command:
            result = _site(world, plan, deadline, job)
        else:
            memo = world.path(f"memo-{plan.name}.json") if world.state else ""
            host = checks.Host(plan.options, deadline, root, world.node, job, memo, world.slurm_environment())
            result = checks.module(plan.name).check(host)  # type: ignore[attr-defined]
        return json.dumps(dict(result.to_dict(), text=result.text[:600], took_s=round(time.monotonic() - started, 4)))

    return function


def _site(world: "World", plan: Plan, deadline: float, job: "Job") -> Result:
    """A site's own check: any executable; 0 ok, 1 warn, 2 fail, 3 unknown, and one line."""
    why = files.distrust(plan.command, os.geteuid())
    if why:
        return checks.unknown(f"not run: {why}")
    env = {"PATH": child.PATH, "LC_ALL": "C", "SR_CONTEXT": world.context, "SR_NODE": world.node}
    if job.id:
        env.update({"SR_JOB_ID": job.id, "SR_JOB_UID": str(job.uid)})
    done = child.run((plan.command,), max(0.1, deadline - time.monotonic() - 0.3), env, cap_bytes=4096)
    line = (done.out.strip() or done.err.strip()).split("\n")[0][:300]
    if done.problem:
        return checks.unknown(done.problem)
    if done.code not in SITE_STATUS:
        return checks.unknown(f"ended with {done.code}, which the contract does not know: {line}")
    return Result(SITE_STATUS[done.code], line, blame=plan.blame)


def _answer(plan: Plan, done: "child.Finished") -> Result:
    result = checks.unknown(done.problem or done.out[:300])
    result.took_s = plan.timeout_s if done.problem else 0.0
    if not done.problem and done.code == 0:
        try:
            value = json.loads(done.out)
            result = Result.from_dict(value if isinstance(value, dict) else {})
            result.took_s = _number(value.get("took_s"), 0.0)
        except ValueError:
            result = checks.unknown(f"its answer is no result: {done.out[:100]!r}")
    result.check = plan.name
    result.severity = result.severity or plan.severity
    return result


def remember(world: "World", results: "list[Result]") -> "dict[str, dict[str, object]]":
    """Count fails and passes in a row, and write the verdict; an unknown changes neither and is no news either way."""
    told = verdict(world)
    steady, now = time.monotonic(), time.time()
    for result in results:
        before = told.get(result.check, {})
        counts = {key: files.integer(before.get(key)) for key in ("fails", "passes", "unknowns")}
        if result.status == FAIL:
            counts = {"fails": counts["fails"] + 1, "passes": 0, "unknowns": 0}
        elif result.status == UNKNOWN:
            counts["unknowns"] += 1
        else:
            counts = {"fails": 0, "passes": counts["passes"] + 1, "unknowns": 0}
        entry = result.to_dict()
        entry.update(counts)
        often = before.get("seen")
        often = dict(often) if isinstance(often, dict) else {}
        often[result.status] = files.integer(often.get(result.status)) + 1
        entry["seen"] = often
        entry["took_s"] = result.took_s
        entry.update({"steady": steady, "at": now})
        if entry["status"] != before.get("status") and (before or entry["status"] != OK):
            ledger.record(world, "check", check=result.check, status=result.status, word=result.word, text=result.text,
                          blame=result.blame, was=before.get("status"))  # fmt: skip
        told[result.check] = entry
    try:
        files.write_json(world.path(VERDICT), {"v": 1, "boot": world.boot, "checks": told})
    except OSError as error:
        ledger.record(world, "own_error", error=f"cannot keep the verdict: {error}")
    return told


def verdict(world: "World") -> "dict[str, dict[str, object]]":
    """What the checks said last on this boot; {} for another boot: a replaced node inherits no verdict."""
    found = files.read_json(world.path(VERDICT)) if world.state else {}
    told = found.get("checks")
    if found.get("boot") != world.boot or not isinstance(told, dict):
        return {}
    return {name: entry for name, entry in told.items() if isinstance(entry, dict) and _whole(name, entry)}


def _whole(name: str, entry: "dict[str, object]") -> bool:
    """Is this what we write?  What a disk or a hand has spoilt is no verdict."""
    try:
        return Result.from_dict(entry).check == name
    except ValueError:
        return False


def fresh(entry: "dict[str, object]", within_s: float) -> bool:
    """Was this said lately?  By the clock since boot, which does not jump."""
    age = time.monotonic() - _number(entry.get("steady"), -1e9)
    return 0.0 <= age <= within_s
