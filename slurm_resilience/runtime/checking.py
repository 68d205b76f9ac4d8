"""A check of the nodes before the ranks of the next attempt start: who takes part, what they are told, when it is over.

It is an attempt like any other as far as agents are concerned, with a number of its own that fences it, and one rank on each
node.  The numbers that it finds are judged in :mod:`node_check`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from slurm_resilience.runtime import inputs as i
from slurm_resilience.runtime import messages as m
from slurm_resilience.runtime.command import parse_python
from slurm_resilience.runtime.fleet import Fleet
from slurm_resilience.runtime.node_check import ROUNDS, Said, groups, judge
from slurm_resilience.runtime.outbox import Outbox
from slurm_resilience.runtime.spec import RunSpec

SCRIPT = Path(__file__).with_name("node_check_rank.py")
# Shares of the time limit: until all are there, until the end of each round.  The rest is for what is on its way.
_HERE, _UNTIL = 0.3, (0.6, 0.9)


class Checking:
    """One check.  ``written``: its number is durable.  It begins when it is made."""

    def __init__(self, out: Outbox, fleet: Fleet, spec: RunSpec, names: Sequence[str], *, limit_s: float, reason: str) -> None:
        self._out, self._fleet, self._spec, self._names = out, fleet, spec, list(names)
        self._limit_s, self._began = limit_s, out.now
        self._conns = {name: fleet.nodes[name].conn for name in names}
        self._port: int | None = None
        self._launched = self._closed = self.written = False
        self._said: dict[str, Said] = {}
        self._ended: set[str] = set()
        self._cut = ""
        out.attempt += 1
        self.number = out.attempt
        fleet.hold(self._names, self.number)
        out.record("node_check_started", nodes=self._names, reason=reason)
        out.put(i.WriteAttempt(self.number))
        out.send(self._conns[self._names[0]], m.Store(self.number))

    def hear(self, node: str, message: m.Message) -> None:
        """Take what an agent says of this attempt; how it ends when it is killed says nothing."""
        if self._closed:
            return
        match message:
            case m.StoreReady():
                self._port = message.port
            case m.StoreFailed():
                self.cut(f"there was no store for it on {node}: {message.why}")
            case m.LaunchFailed():
                self.cut(f"it could not be started on {node}: {message.why}")
            case m.Refused():
                self.cut(f"{node} refused it: {message.why}")
            case m.Exit():
                self._ended.add(node)
            case m.Fact() if message.fact == "node_checked":
                self._note(node, message)

    def cut(self, why: str) -> None:
        """End it without a verdict."""
        self._cut = self._cut or why

    def over(self) -> bool:
        """Launch when that is possible; True when there is nothing more to wait for."""
        moved = next((name for name, conn in self._conns.items() if self._fleet.nodes[name].conn != conn), None)
        if moved is not None:
            self.cut(f"the connection to {moved} was lost meanwhile")
        self._closed = bool(self._cut) or self._all_said() or self._out.now - self._began > self._limit_s
        if not self._closed and not self._launched and self.written and self._port is not None:
            self._launch(self._port)
        return self._closed

    def _all_said(self) -> bool:
        return all(name in self._ended or (name in self._said and self._said[name].complete) for name in self._names)

    def finish(self) -> None:
        """Everything of it is gone: put the verdict on record."""
        if not self._cut and not self._launched:
            self._cut = f"it could not begin within {self._limit_s:g} s"
        elif not self._cut and self._ended == set(self._names) and not self._said:
            log = f"logs/attempt-{self.number:04d}"
            self._cut = f"it ended on every node without a word; {log} may say why (torch is needed)"
        verdict = judge(self._names, self._said)
        suspects, inconclusive = ({}, self._cut) if self._cut else (verdict.suspects, verdict.inconclusive)
        times = {
            name: [each.alone_s, *(each.rounds.get(number) for number in range(ROUNDS))] for name, each in self._said.items()
        }
        self._out.record(
            "node_check_done", nodes=self._names, suspects=suspects, inconclusive=inconclusive or None, times=times,
            seconds=round(self._out.now - self._began, 3),
        )  # fmt: skip

    def _note(self, node: str, fact: m.Fact) -> None:
        part, seconds = fact.fields.get("part"), fact.fields.get("seconds")
        took = round(float(seconds), 5) if isinstance(seconds, int | float) else None
        said = self._said.setdefault(node, Said())
        if part == "alone":
            said.alone_s = took
        elif isinstance(part, int) and 0 <= part < ROUNDS:
            said.rounds[part] = took

    def _launch(self, port: int) -> None:
        self._launched = True
        python = parse_python(self._spec.argv)
        interpreter = [python.interpreter, *python.flags] if python is not None else [sys.executable]
        count = len(self._names)
        mates = [{place: group for group in groups(count, number) for place in group} for number in range(ROUNDS)]
        times = {"here_s": _HERE * self._limit_s, "until_s": [share * self._limit_s for share in _UNTIL]}
        for place, name in enumerate(self._names):
            launch = m.Launch(
                attempt=self.number, world=count, ranks=[[place, 0]], group_rank=place, groups=count,
                master_addr=self._fleet.nodes[self._names[0]].address, master_port=port, argv=[*interpreter, str(SCRIPT)],
                cwd=self._spec.cwd, env=self._spec.env, checkpoints=self._spec.checkpoints, settings=self._spec.settings,
                plan={"check": {**times, "groups": [list(round_[place]) for round_ in mates]}},
                header=f"=== attempt {self.number}, a check of the nodes, on {name} ===",
            )  # fmt: skip
            self._out.send(self._conns[name], launch)
