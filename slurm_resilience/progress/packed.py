"""How is a plan written so that what each node is told does not grow with the number of nodes?

A plan names every node and what each holds.  Sent to each of thousands of nodes, that is a gigabyte for one launch, and more
than one environment variable may hold.  Names that count up and values that repeat are written as runs; everything else
stays as it is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MARK = "packed"
# A smaller plan is sent as it is, for whoever reads it in the environment.
FEWEST_NODES = 64
_LISTS = ("ranks_per_node", "samples_per_dp_rank")
_BY_NODE = ("spare_gpus", "left_out")
_COUNTED = re.compile(r"(.*?)([0-9]{1,15})")


def pack(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The same plan with its long lists as runs; a small one as it is."""
    nodes = plan.get("nodes") or ()
    if MARK in plan or len(nodes) < FEWEST_NODES:
        return dict(plan)
    out = dict(plan) | {MARK: 1, "nodes": list(_names(nodes))}
    for key in _LISTS:
        if plan.get(key):
            out[key] = list(_values(plan[key]))
    for key in _BY_NODE:
        if plan.get(key):
            out[key] = [list(_names(plan[key])), list(_values(plan[key].values()))]
    return out


def unpack(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan that was packed; one that was not as it is."""
    if MARK not in plan:
        return dict(plan)
    out = {key: value for key, value in plan.items() if key != MARK}
    out["nodes"] = _spell(plan["nodes"])
    for key in _LISTS:
        if plan.get(key):
            out[key] = _repeat(plan[key])
    for key in _BY_NODE:
        if plan.get(key):
            names, values = plan[key]
            out[key] = dict(zip(_spell(names), _repeat(values), strict=True))
    return out


def _names(names: Iterable[str]) -> Iterator[list[Any]]:
    """``[stem, first number as written, how many]`` for names that count up, ``[name]`` for others, in the order given."""
    run: list[Any] = []
    following = ""
    for name in names:
        if run and name == following:
            run[2] += 1
        else:
            if run:
                yield run if run[1] else run[:1]
            counted = _COUNTED.fullmatch(name)
            run = [counted[1], counted[2], 1] if counted else [name, "", 1]
        following = f"{run[0]}{int(run[1]) + run[2]:0{len(run[1])}d}" if run[1] else ""
    if run:
        yield run if run[1] else run[:1]


def _spell(runs: Sequence[Sequence[Any]]) -> list[str]:
    out: list[str] = []
    for stem, *counted in runs:
        if counted:
            first, many = counted
            out += [f"{stem}{int(first) + number:0{len(first)}d}" for number in range(many)]
        else:
            out.append(stem)
    return out


def _values(values: Iterable[Any]) -> Iterator[list[Any]]:
    """``[value, how many]`` for equal ones in a row."""
    for value, same in itertools.groupby(values):
        yield [value, sum(1 for _ in same)]


def _repeat(runs: Iterable[Sequence[Any]]) -> list[Any]:
    return [value for value, many in runs for _ in range(many)]
