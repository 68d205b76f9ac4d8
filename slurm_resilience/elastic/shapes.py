"""Which meshes are possible at all?  Everything about them but the one degree that takes what there is.

A :class:`Shape` fixes all axes except (usually) one data-parallel axis.  The shapes of an experiment are few and do not
depend on how many nodes are left, so that thousands of allocations are planned with a few divisions each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm, prod

from slurm_resilience.elastic.axes import WORLD_AXES, Axis, MeshConstraints
from slurm_resilience.errors import ConfigError

_MOST_SHAPES = 1 << 16  # each is looked at for each allocation


@dataclass(frozen=True)
class Shape:
    """``degrees`` of all axes but ``free``; ``inner`` ranks stay together inside a node.

    ``product`` is that of the given world axes, ``dp`` of the data-parallel ones among them.  The degree of ``free`` must be
    a multiple of ``step``, so that expert groups come out whole.
    """

    degrees: dict[str, int]
    free: str | None
    axis: Axis
    inner: int
    product: int
    dp: int
    step: int

    def fill(self, sizes: Mapping[int, int], max_dp: int | None) -> int | None:
        """The largest degree of the free axis (1 where there is none) on nodes of ``sizes`` (GPUs → how many such nodes).

        None when even the smallest does not fit.
        """
        inner = self.inner
        room = sum(count * (size // inner) for size, count in sizes.items()) * inner // self.product
        if max_dp is not None:
            room = min(room, max_dp // self.dp)
        if self.free is None:
            return 1 if room else None
        return _largest(self.axis, room, self.step)


def _largest(axis: Axis, room: int, step: int) -> int | None:
    if axis.fixed is not None or axis.divides is not None:
        return max((degree for degree in axis.candidates(room) if degree % step == 0), default=None)
    degree = room if axis.at_most is None else min(room, axis.at_most)
    degree -= degree % step
    return degree if degree >= axis.at_least and degree > 0 else None


def shapes(rules: MeshConstraints, *, largest_node: int, gpus: int, previous: Mapping[str, int] | None = None) -> list[Shape]:
    """All shapes that can fit on at most ``gpus`` GPUs in nodes of at most ``largest_node``."""
    inside = _inside(rules)
    found: list[Shape] = []
    for inner in _choices([(name, rules.axis(name)) for name in inside], largest_node):
        for degrees, free in _outer(rules, inner, gpus, previous):
            found += _with_experts(rules, degrees, free, prod(inner.values()), gpus, largest_node)
            if len(found) > _MOST_SHAPES:
                raise ConfigError(
                    "The constraints of the mesh leave too much open to be planned",
                    evidence=f"they allow more than {_MOST_SHAPES} meshes on {gpus} GPUs, data parallel apart",
                    remedy='fix an axis (pp=4), or bound it closer (pp="<=16" or pp="/32")',
                )
    return found


def _inside(rules: MeshConstraints) -> tuple[str, ...]:
    """The axes whose groups stay inside a node; ranks are row-major, so all axes further in do as well."""
    for index, name in enumerate(WORLD_AXES):
        if rules.inside_node(name):
            return WORLD_AXES[index:]
    return ()


def _outer(
    rules: MeshConstraints, inner: Mapping[str, int], gpus: int, previous: Mapping[str, int] | None
) -> Iterator[tuple[dict[str, int], str | None]]:
    outer = [name for name in WORLD_AXES if name not in inner]
    open_axes = [name for name in ("dp_shard", "dp_replicate") if name in outer and rules.axis(name).single is None]
    free = open_axes[0] if open_axes else None
    if len(open_axes) == 2 and rules.axis("dp_replicate").most is None and rules.axis("dp_shard").most is not None:
        free = "dp_replicate"
    limits = []
    for name in outer:
        axis = rules.axis(name)
        if name in open_axes and name != free and axis.most is None:
            # Two unbounded axes: replication stays as it was, sharding takes what there is.
            wanted = (previous or {}).get(name, axis.at_least)
            axis = Axis(fixed=wanted if axis.allows(wanted) else axis.at_least)
        if name != free:
            limits.append((name, axis))
    for chosen in _choices(limits, gpus // prod(inner.values())):
        yield {**chosen, **inner}, free


def _with_experts(
    rules: MeshConstraints, degrees: dict[str, int], free: str | None, inner: int, gpus: int, largest_node: int
) -> Iterator[Shape]:
    """One shape for each expert degree that can divide dp_shard x cp."""
    product = prod(degrees.values())
    dp = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    axis = rules.axis(free) if free else Axis(fixed=1)
    inside = rules.inside_node("ep")
    for expert in rules.ep.candidates(largest_node // degrees["tp"] if inside else gpus):
        step = expert // gcd(expert, degrees["cp"])
        if free != "dp_shard":
            if degrees["dp_shard"] % step:
                continue
            step = 1
        together = lcm(inner, expert * degrees["tp"]) if inside else inner
        yield Shape({**degrees, "ep": expert}, free, axis, together, product, dp, step)


def _choices(axes: Sequence[tuple[str, Axis]], most: int) -> Iterator[dict[str, int]]:
    """Every allowed choice for these axes whose product is at most ``most``."""
    if not axes:
        if most:
            yield {}
        return
    (name, axis), *rest = axes
    for degree in axis.candidates(most):
        for others in _choices(rest, most // degree):
            yield {name: degree, **others}
