"""What may each axis of the mesh be?  The user's constraints, as values.

Axes, outermost first: ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``; a rank's number is row-major over them, so tp
groups are neighbours.  ``ep`` is not a factor of its own: expert parallel groups are made of dp_shard x cp (as in torchtitan),
so it must divide their product; a group of it, with the tp groups of its members, is a run of neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_resilience.errors import ConfigError, nearest

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
WORLD_AXES = AXES[:-1]
MOST_GPUS = 1 << 20  # beyond any cluster; all of them are looked at, so nonsense would take for ever


@dataclass(frozen=True)
class Axis:
    """The degrees that one axis may have.

    ``fixed`` exactly so many · ``at_least``/``at_most`` bounds · ``divides`` the degree must divide this number (heads,
    layers, experts) · ``inside_node`` a group of this axis never crosses a node (None: the default of the axis).
    """

    fixed: int | None = None
    at_least: int = 1
    at_most: int | None = None
    divides: int | None = None
    inside_node: bool | None = None

    def __post_init__(self) -> None:
        for name in ("fixed", "at_least", "at_most", "divides"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"A mesh axis cannot have {name}={value}", remedy="use 1 for an axis that is not wanted")
            if value is not None and value > MOST_GPUS:
                raise ConfigError(f"A mesh axis cannot have {name}={value}", evidence=f"no cluster has {MOST_GPUS} GPUs")
        if self.at_most is not None and self.at_most < self.at_least:
            raise ConfigError(f"A mesh axis of at least {self.at_least} and at most {self.at_most} cannot exist")
        if self.fixed is not None and not self.allows(self.fixed):
            raise ConfigError(f"A mesh axis fixed at {self.fixed} breaks its other limits: {self.limits()}")

    def allows(self, degree: int) -> bool:
        """Whether the axis may have this degree."""
        return (
            degree >= self.at_least
            and (self.fixed is None or degree == self.fixed)
            and (self.at_most is None or degree <= self.at_most)
            and (self.divides is None or self.divides % degree == 0)
        )

    @property
    def single(self) -> int | None:
        """The one degree that is possible, where there is only one."""
        if self.fixed is not None:
            return self.fixed
        return self.at_least if self.most == self.at_least else None

    @property
    def most(self) -> int | None:
        """The largest degree that can be possible; None without a limit of its own."""
        return min((n for n in (self.fixed, self.at_most, self.divides) if n is not None), default=None)

    def candidates(self, most: int) -> list[int]:
        """All degrees up to ``most`` that the axis may have, smallest first."""
        if self.fixed is not None:
            return [self.fixed] if self.fixed <= most else []
        bound = min(n for n in (most, self.at_most, self.divides) if n is not None)
        if self.divides is not None:
            small = [d for d in range(1, int(self.divides**0.5) + 1) if self.divides % d == 0]
            both = sorted({*small, *(self.divides // d for d in small)})
            return [d for d in both if self.at_least <= d <= bound]
        return list(range(self.at_least, bound + 1))

    def limits(self) -> str:
        """The constraint in words."""
        parts = [] if self.fixed is None else [f"exactly {self.fixed}"]
        parts += [f"at least {self.at_least}"] if self.at_least > 1 else []
        parts += [] if self.at_most is None else [f"at most {self.at_most}"]
        parts += [] if self.divides is None else [f"a divisor of {self.divides}"]
        parts += ["inside a node"] if self.inside_node else []
        return ", ".join(parts) or "any"

    @classmethod
    def of(cls, value: Any) -> Axis:
        """From a number (fixed), a mapping of fields, or a text such as ``"any"``, ``"<=8,/32"``, ``"4,out"``."""
        if isinstance(value, Axis):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(fixed=value)
        if isinstance(value, Mapping):
            fields = cls.__dataclass_fields__
            for key in value:
                if key not in fields:
                    raise ConfigError(f"Unknown constraint {key!r} of a mesh axis", remedy=nearest(str(key), fields))
            return cls(**value)
        if isinstance(value, str):
            return cls(**_parse(value))
        raise ConfigError(f"{value!r} is not a constraint of a mesh axis", remedy=_FORMS)


_SIGNS = {"<=": "at_most", ">=": "at_least", "/": "divides", "": "fixed"}
_WORD = re.compile(r"(<=|>=|/|)([0-9]{1,99})")
_FORMS = (
    'use a number, or "any", "<=8", ">=2", "/32" (a divisor of 32), "in" (inside a node), "out" (may cross nodes), '
    "several joined by commas"
)


def _parse(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in text.replace(" ", "").split(","):
        if word == "any":
            continue
        name, value = _read(word)
        if name is None:
            raise ConfigError(
                f"{text[:80]!r} is not a constraint of a mesh axis", evidence=f"cannot read {word[:80]!r}", remedy=_FORMS
            )
        if name in fields:
            raise ConfigError(
                f"{text[:80]!r} is not a constraint of a mesh axis",
                evidence=f"{word[:80]!r} is a second word on what was said before, and only one of them could count",
                remedy=_FORMS,
            )
        fields[name] = value
    return fields


def _read(word: str) -> tuple[str | None, Any]:
    """The field that a word is about, and its value; (None, None) for no word of ours."""
    if word in ("in", "out"):
        return "inside_node", word == "in"
    found = _WORD.fullmatch(word)
    return (_SIGNS[found[1]], int(found[2])) if found else (None, None)


@dataclass(frozen=True)
class MeshConstraints:
    """Constraints of all axes.  By default everything is data parallel: ``dp_shard`` takes what there is.

    ``tp`` stays inside a node unless told otherwise.  An axis that the user fixed never changes on a smaller
    allocation.  Once ``dp_shard`` has a limit of its own, ``dp_replicate`` becomes free and is what shrinks.
    """

    pp: Axis = Axis(fixed=1)
    dp_replicate: Axis | None = None
    dp_shard: Axis = field(default=Axis())
    cp: Axis = Axis(fixed=1)
    tp: Axis = Axis(fixed=1)
    ep: Axis = Axis(fixed=1)

    def __post_init__(self) -> None:
        for name in ("pp", "cp", "tp", "ep"):
            if getattr(self, name).most is None and not self.inside_node(name):
                raise ConfigError(
                    f"The mesh axis {name} has no upper limit",
                    evidence=f"only the data-parallel axes may take what there is; {name} changes the model's own layout",
                    remedy=f'fix it ({name}=2), or bound it ({name}="<=4" or {name}="/32")',
                )

    def axis(self, name: str) -> Axis:
        """The constraint of one axis, defaults applied."""
        if name == "dp_replicate" and self.dp_replicate is None:
            bounded = self.dp_shard.most is not None or self.inside_node("dp_shard")
            return Axis() if bounded else Axis(fixed=1)
        value: Axis = getattr(self, name)
        return value

    def inside_node(self, name: str) -> bool:
        """Whether groups of this axis must not cross nodes; those of the axes inside it must not either."""
        axis = getattr(self, name)
        chosen = None if axis is None else axis.inside_node
        return name == "tp" if chosen is None else chosen

    @classmethod
    def of(cls, **axes: Any) -> MeshConstraints:
        """From plain values, e.g. ``of(tp=4, pp="<=4,/24", dp_shard={"at_most": 8, "inside_node": True})``."""
        for name in axes:
            if name not in AXES:
                raise ConfigError(f"Unknown mesh axis {name!r}", remedy=nearest(name, AXES))
        return cls(**{name: Axis.of(value) for name, value in axes.items() if value is not None})
