"""One attempt as the supervisor follows it: who runs what, what was said, who has ended, who has gone quiet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slurm_resilience.config import LimitsConfig
from slurm_resilience.errors import Cause
from slurm_resilience.progress.sections import word
from slurm_resilience.runtime import hang, stacks
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.evidence import Evidence
from slurm_resilience.runtime.facts import Facts, Note
from slurm_resilience.runtime.limits import STEP, Limits
from slurm_resilience.runtime.planner import Placement
from slurm_resilience.runtime.stragglers import Stragglers
from slurm_resilience.runtime.unseen import Unseen, linger_s

# An agent that dialled again sends what it had kept for us; a rank that it no longer has gets this long to be explained.
_EXPLAIN_S = 1.0
# Libraries abort or crash when they are taken down while their threads still run.
_TEARDOWN = frozenset({"SIGABRT", "SIGSEGV"})
_LAST_WORDS_S = 1.0
# Ranks of a script without a Run end with code 0 one after the other; a longer gap than this is worth an event.
_EARLY_S = 5.0
# Written down in full; with thousands of ranks the rest are echoes that fill the disk.
_MOST_EXCEPTIONS = 16
# Stacks of ranks that are kept; the rest mostly wait for these.
_MOST_LOOKS = 256


class Attempt:
    """The state of one attempt; it decides nothing.

    ``preparing``: no agent has been told of its ranks yet, so none can miss any.  ``killing``: we have told the agents to kill
    the ranks, so their deaths are no news.
    """

    def __init__(self, number: int, placement: Placement, *, now: float, limits: Limits | None = None) -> None:
        self.number = number
        self.limits = limits or Limits(LimitsConfig(), {})
        self.looks: dict[int, Mapping[str, Any]] = {}
        self.kernel: dict[str, list[str]] = {}
        self.exceptions: list[dict[str, Any]] = []
        self.placement = placement
        self.node_of = placement.node_of()
        self._ranks_of = {name: frozenset(ranks) for name, ranks in zip(placement.nodes, placement.ranks, strict=True)}
        self.started_at = now
        self.evidence = Evidence()
        self.facts = Facts(placement.world)
        self.exits: dict[int, m.Exit] = {}
        self.preparing = False
        self.killing = False
        self.written = False
        self.master_port: int | None = None
        self.rejoined: set[str] = set()
        self.step = -1
        self._launched: dict[str, m.Launched] = {}
        self._progress: dict[int, tuple[m.RankProgress, float]] = {}
        self._missing: dict[int, float] = {}
        self._left_early_at: float | None = None
        self._early: list[tuple[m.Exit, float]] = []
        self._raised_at: float | None = None
        self._stragglers = Stragglers(self.node_of)
        self._unseen = Unseen()
        self._lingers = False
        self._judge = hang.Judge()

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.placement.nodes

    @property
    def world(self) -> int:
        return len(self.node_of)

    @property
    def reached(self) -> int | None:
        """The highest step that any rank completed; None before the first."""
        return self.step if self.step >= 0 else None

    @property
    def all_ended(self) -> bool:
        return len(self.exits) == self.world

    @property
    def is_over(self) -> bool:
        """All have ended, or are complete and do nothing any more without ending."""
        return self.all_ended or self._lingers

    @property
    def all_well(self) -> bool:
        """Every rank has ended with code 0, or had saved and said so when it was killed."""
        well = self.all_ended and all(end.code == 0 for end in self.exits.values())
        return well or self.facts.said_by_all("stopped") or self.facts.said_by_all("finished")

    def failed(self, now: float) -> bool:
        """Something has ended, or not begun, that should not have.

        A rank that has told of its exception gets a moment to print it and to end by itself.
        """
        return self.evidence.seen or (self._raised_at is not None and now - self._raised_at > _LAST_WORDS_S)

    @property
    def incomplete(self) -> bool:
        """An agent came back without a rank that it should have."""
        return any(rank not in self.exits for rank in self._missing)

    def failed_at(self, wall: float) -> float:
        """Wall-clock time of the first failure."""
        origin = self.evidence.origin()
        return min(wall, origin.since) if origin is not None else wall

    def alive_on(self, node: str) -> set[int]:
        """Ranks that should be alive there."""
        return {rank for rank in self._ranks_of.get(node, ()) if rank not in self.exits}

    def uses(self, node: str) -> bool:
        """It has ranks there, whether or not they are alive."""
        return node in self._ranks_of

    @property
    def all_rejoined(self) -> bool:
        """The agent of every node of it has dialled again."""
        return len(self.rejoined) == len(self.nodes)

    @property
    def progress(self) -> Mapping[int, tuple[m.RankProgress, float]]:
        """What each rank that lives was last seen doing, and when (monotonic)."""
        return self._progress

    def as_looks(self) -> dict[int, hang.Look]:
        """The same as the judge of hangs reads it, by rank."""
        return {rank: _look(each) for rank, (each, _) in sorted(self._progress.items())}

    def hear(self, node: str, message: m.Message, *, now: float, wall: float) -> list[Note]:
        """Note a message that belongs to this attempt; what is to be written because of it."""
        match message:
            case m.Beat():
                self._saw_progress(message.progress(), now)
            case m.Seen():
                self.limits.note({name: self._own(name, seen, now) for name, seen in message.work.items()})
            case m.Looked():
                self._saw_look(node, message)
            case m.StoreReady():
                self.master_port = message.port
            case m.StoreFailed():
                self.master_port = 0
                return [("store_failed", {"node": node, "detail": message.why}, None)]
            case m.Launched():
                return self._saw_launch(node, message, now)
            case m.LaunchFailed():
                self.evidence.add(Cause.LAUNCH_FAILED, t=wall, node=node, detail=message.why)
            case m.Refused() if message.what in ("launch", "store"):
                detail = f"refused to {message.what}: {message.why}"
                self.evidence.add(Cause.LAUNCH_FAILED, t=wall, node=node, detail=detail)
            case m.Exit() if message.rank in self.node_of:
                return self._saw_exit(node, message, now)
            case m.Fact():
                return self._saw_fact(node, message, now)
            case m.Stopped() if message.attempt == self.number and not self.killing and self.alive_on(node):
                detail = f"its agent had stopped the ranks by itself ({message.why})"
                self.evidence.add(Cause.UNKNOWN, t=min(wall, message.since or wall), node=node, detail=detail)
        return []

    def lost(self, node: str, *, since: float, why: str) -> None:
        """The node is lost, and with it the ranks that it has."""
        if self.alive_on(node):
            self.evidence.add(Cause.NODE_LOST, t=since, node=node, detail=why)

    def came_back(self, node: str, alive: set[int], now: float) -> None:
        """The node's agent dialled again and still has these ranks."""
        self.rejoined.add(node)
        if self.preparing:
            return
        self._missing.update(dict.fromkeys(self.alive_on(node) - alive, now))

    def judge(self, limits: LimitsConfig, *, now: float, wall: float) -> list[Note]:
        """Look for ranks that have vanished or gone quiet, which becomes evidence, and for those that left too early."""
        for rank, since in self._missing.items():
            if rank not in self.exits and now - since > _EXPLAIN_S:
                detail = "gone when its agent dialled again"
                self.evidence.add(Cause.RANK_CRASH, t=wall, node=self.node_of[rank], rank=rank, detail=detail)
        notes = self._look_for_hangs(limits, now, wall)
        early, self._early = self._early, []
        for end, at in early:
            if now - at < _EARLY_S:
                self._early.append((end, at))
            else:
                fields = {"node": self.node_of[end.rank], "rank": end.rank, "step": end.step if end.step >= 0 else None}
                notes.append(("rank_exited_early", fields, end.t))
        return notes

    def _look_for_hangs(self, limits: LimitsConfig, now: float, wall: float) -> list[Note]:
        """Silence becomes evidence; what else is worth to be known of the ranks' pace becomes notes."""
        looks = {rank: _look(each) for rank, (each, _) in self._progress.items()}
        found = self._judge.find(looks, self.limits, init_s=limits.init_s, now=now)
        if found is not None:
            since = self._progress[found.rank][1] - found.silent_s
            self._hangs(found.rank, found.why, t=wall - (now - since))
        elif (
            self._left_early_at is not None
            and not any(each.beats for each in looks.values())
            and now - self._left_early_at > limits.init_s
        ):
            # Silent ranks of a script without a Run get time to follow one that left, and no more: nobody waits for ever.
            stayed = min(set(self.node_of) - set(self.exits))
            why = f"ranks {sorted(self.exits)} left early with code 0 and the others did not follow in {limits.init_s:g} s"
            self._hangs(stayed, why, t=wall - (now - self._left_early_at))
        living = {rank: each for rank, (each, _) in self._progress.items()}
        notes, quiet = self._unseen.look(living, self.node_of, limits, age_s=now - self.started_at)
        if quiet is not None:
            self._hangs(quiet.rank, quiet.why, t=wall - quiet.silent_s)
        lingering = linger_s(living, limits) if self.facts.said_by_all("finished") and not self._lingers else None
        if lingering is not None:
            self._lingers = True
            notes.append(("lingered", {"ranks": len(living), "quiet_s": round(lingering, 1)}, None))
        notes += self._stragglers.look({rank: (each.own_s, each.own_count) for rank, each in living.items()}, now)
        news = self.limits.news()
        if news is not None:
            notes.append(("limits_set", {"limits": news, "seen": self.limits.longest(), "world": self.world}, None))
        return notes

    def _own(self, name: str, seen: Any, now: float) -> tuple[int, float]:
        """What a rank was silent for by itself: waiting for another that was busy teaches nothing about steps."""
        times, longest_s = int(seen[0]), float(seen[1])
        return times, longest_s - self._judge.waited(longest_s, now) if name == STEP else longest_s

    def _hangs(self, rank: int, why: str, *, t: float) -> None:
        self.evidence.add(Cause.HANG, t=t, node=self.node_of[rank], rank=rank, detail=why)

    def name_culprit(self) -> None:
        """Name the rank that the others waited for, which their last looks show, where the limits had named one that waits."""
        origin = self.evidence.origin()
        if origin is None or origin.cause is not Cause.HANG:
            return
        found = stacks.culprit(self.looks, origin.rank)
        if found is not None:
            rank, why = found
            self.evidence.pinpoint(rank=rank, node=self.node_of.get(rank, origin.node), detail=f"{why}; {origin.detail}")

    def _saw_progress(self, progress: dict[int, m.RankProgress], now: float) -> None:
        for rank, each in progress.items():
            if rank in self.node_of and rank not in self.exits:
                self._progress[rank] = (each, now)
                self.step = max(self.step, each.step)

    def _saw_look(self, node: str, looked: m.Looked) -> None:
        if looked.kernel:
            self.kernel[node] = looked.kernel
        for rank, look in looked.ranks.items():
            if rank.isdigit() and isinstance(look, dict) and len(self.looks) < _MOST_LOOKS:
                self.looks[int(rank)] = look

    def _saw_launch(self, node: str, said: m.Launched, now: float) -> list[Note]:
        notes: list[Note] = []
        if not said.warm and said.reason:
            notes.append(("launched_cold", {"node": node, "reason": said.reason}, None))
        self._launched[node] = said
        if len(self._launched) == len(self.nodes):
            warm = all(each.warm for each in self._launched.values())
            seconds = round(now - self.started_at, 3)
            pids = {name: each.pids for name, each in self._launched.items()}
            notes.append(("ranks_launched", {"world": self.world, "warm": warm, "seconds": seconds, "pids": pids}, None))
        return notes

    def _saw_exit(self, node: str, end: m.Exit, now: float) -> list[Note]:
        if end.rank in self.exits:
            return []
        notes: list[Note] = []
        if end.signal in _TEARDOWN and self.facts.said_by(end.rank, "script_ended"):
            fields = {"node": node, "rank": end.rank, "step": end.step, "signal": end.signal, "tail": end.tail[-3:]}
            notes.append(("died_at_exit", fields, end.t))
            end = replace(end, code=0, signal="")
        self.exits[end.rank] = end
        self.step = max(self.step, end.step)
        self._progress.pop(end.rank, None)
        if end.code != 0:
            if not (self.killing and end.signal in ("SIGKILL", "SIGTERM")):
                self.evidence.exit(
                    t=end.t, node=node, rank=end.rank, code=end.code, signal=end.signal, tail=end.tail, oom=end.oom
                )
            return []
        if end.done or self.all_ended:
            if self._left_unfinished():
                notes.append(("left_unfinished", {"step": self.step, "ranks": self.world}, None))
            return notes
        self.evidence.left(t=end.t, node=node, rank=end.rank)
        if self._left_early_at is None:
            self._left_early_at = now
        self._early.append((end, now))
        return []

    def _left_unfinished(self) -> bool:
        """All ranks have left with code 0 in the middle of the loop of their ``Run``, and nobody had asked them to stop."""
        ends = self.exits.values()
        said = self.facts.said("finished") or self.facts.said("stopped")
        return (
            not said
            and self.all_ended
            and all(end.code == 0 and not end.done for end in ends)
            and any(end.step > 0 for end in ends)
        )

    def _saw_fact(self, node: str, fact: m.Fact, now: float) -> list[Note]:
        step = fact.fields.get("step")
        if isinstance(step, int):
            self.step = max(self.step, step)
        if fact.fact == "exception":
            self._raised_at = self._raised_at or now
            kind, message = str(fact.fields.get("type", "")), str(fact.fields.get("message", ""))
            at = step if isinstance(step, int) else None
            code = fact.fields.get("exit_code")
            code = code if isinstance(code, int) else None
            self.evidence.exception(
                t=fact.t, node=node, rank=fact.rank, kind=kind, message=message, step=at, exit_code=code
            )  # fmt: skip
            if len(self.exceptions) >= _MOST_EXCEPTIONS:
                return []
            self.exceptions.append({"t": fact.t, "node": node, "rank": fact.rank, **fact.fields})
        return self.facts.hear(node, fact)


def _look(each: m.RankProgress) -> hang.Look:
    """What a beat says of a rank; one of an older agent says only for how long it was silent."""
    sections = tuple(hang.Section.parse(list(raw)) for raw in each.sections)
    if not sections:
        sections = (hang.Section(word(each.phase), None, each.age_s, each.phase_age_s, max(0, each.step)),)
    return hang.Look(each.step, each.beats, each.done, sections, each.quiet_s)
