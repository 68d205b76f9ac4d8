"""Which mesh fits on the GPUs that are left?

The best feasible one: most GPUs used, then fewest axes changed from the previous mesh, then more sharding.  What does not
fit is left over as spares, named, taken from the last nodes so that whole nodes become free.  Where nothing fits,
the error names the smallest change that would help.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from slurm_resilience.elastic.axes import AXES, WORLD_AXES, MeshConstraints
from slurm_resilience.errors import ConfigError


@dataclass(frozen=True)
class MeshPlan:
    """A mesh and where it lies: ``used_per_node`` ranks on each node, in the order given (0: a whole node spare)."""

    axes: dict[str, int]
    used_per_node: tuple[int, ...]
    spares_per_node: tuple[int, ...]
    reason: str

    @property
    def used(self) -> int:
        """Ranks in the mesh, one per GPU."""
        return prod(self.axes[name] for name in WORLD_AXES)

    @property
    def spares(self) -> int:
        """GPUs left over."""
        return sum(self.spares_per_node)

    @property
    def dp_ranks(self) -> int:
        """Ranks that see different samples; those of pp, cp and tp share theirs."""
        return self.axes["dp_replicate"] * self.axes["dp_shard"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's place on each axis."""
        if not 0 <= rank < self.used:
            raise ValueError(f"rank {rank} of {self.used}")
        out: dict[str, int] = {}
        for name in reversed(WORLD_AXES):
            rank, out[name] = divmod(rank, self.axes[name])
        return {name: out[name] for name in WORLD_AXES}

    def dp_rank(self, rank: int) -> int:
        """Which share of the global batch the rank works on."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.axes["dp_shard"] + at["dp_shard"]


def plan_mesh(
    ranks: int | None = None,
    constraints: MeshConstraints | None = None,
    *,
    gpus_per_node: int | Sequence[int] | None = None,
    max_dp: int | None = None,
    previous: Mapping[str, int] | None = None,
) -> MeshPlan:
    """The best mesh on ``ranks`` GPUs, or on nodes with ``gpus_per_node`` each.

    ``gpus_per_node`` as one number spreads ``ranks`` over nodes of that size (the last may be smaller); as a sequence it is
    the count of each node.  ``max_dp`` bounds dp_replicate x dp_shard (a rank without samples would idle).
    ``previous`` is the mesh of the last attempt.  Raises :class:`ConfigError` when no mesh fits.
    """
    rules = constraints or MeshConstraints()
    nodes = _node_sizes(ranks, gpus_per_node)
    best: tuple[tuple[int, ...], dict[str, int], int] | None = None
    for inner in _inner_blocks(rules, max(nodes)):
        blocks = sum(size // inner.size for size in nodes)
        for axes in _fill(rules, inner, blocks, max_dp):
            used = prod(axes[name] for name in WORLD_AXES)
            changes = sum(axes[name] != previous.get(name, 1) for name in AXES) if previous else 0
            key = (used, -changes, axes["dp_shard"], -axes["pp"] * axes["tp"])
            if best is None or key > best[0]:
                best = (key, axes, inner.size)
    if best is None:
        raise _refusal(rules, nodes, max_dp)
    _, axes, inner_size = best
    return _lay_out(axes, inner_size, nodes)


def _node_sizes(ranks: int | None, gpus_per_node: int | Sequence[int] | None) -> list[int]:
    if isinstance(gpus_per_node, Sequence):
        sizes = list(gpus_per_node)
    elif ranks is None or ranks < 1:
        raise ConfigError(f"A mesh cannot be planned for {ranks} ranks", remedy="give at least one rank")
    else:
        size = gpus_per_node or ranks
        sizes = [size] * (ranks // size) + ([ranks % size] if ranks % size else [])
    if not sizes or max(sizes) < 1 or min(sizes) < 0:
        raise ConfigError("A mesh cannot be planned without GPUs", evidence=f"GPUs of each node: {sizes}")
    return sizes


@dataclass(frozen=True)
class _Inner:
    """The innermost axes, which stay inside a node; ``size`` is their product."""

    axes: dict[str, int]
    size: int


def _inner_names(rules: MeshConstraints) -> tuple[str, ...]:
    """The axes whose groups stay inside a node, and, since ranks are row-major, all axes inside those."""
    for index, name in enumerate(WORLD_AXES):
        if rules.inside_node(name):
            return WORLD_AXES[index:]
    return ()


def _inner_blocks(rules: MeshConstraints, most: int) -> Iterator[_Inner]:
    for axes in _product(rules, _inner_names(rules), most):
        yield _Inner(axes, prod(axes.values()))


def _product(rules: MeshConstraints, names: Sequence[str], most: int) -> Iterator[dict[str, int]]:
    """Every allowed choice for these axes whose product is at most ``most``."""
    if not names:
        yield {}
        return
    name, *rest = names
    for degree in rules.axis(name).candidates(most):
        for others in _product(rules, rest, most // degree):
            yield {name: degree, **others}


def _fill(rules: MeshConstraints, inner: _Inner, blocks: int, max_dp: int | None) -> Iterator[dict[str, int]]:
    """Every mesh around ``inner`` that is the largest for its choice of the other axes."""
    outer = [name for name in WORLD_AXES if name not in inner.axes]
    free = [name for name in ("dp_shard", "dp_replicate") if name in outer and rules.axis(name).single is None]
    last = free[0] if free else None
    for chosen in _product(rules, [name for name in outer if name != last], blocks):
        axes = {**inner.axes, **chosen}
        if last is not None:
            room = blocks // prod(chosen.values())
            if max_dp is not None:
                room = min(room, max_dp // (axes.get("dp_shard", 1) * axes.get("dp_replicate", 1)))
            degree = _largest(rules, last, room)
            if degree is None:
                continue
            axes[last] = degree
        if max_dp is not None and axes["dp_shard"] * axes["dp_replicate"] > max_dp:
            continue
        expert = _expert(rules, axes)
        if expert is not None:
            yield {**{name: axes[name] for name in WORLD_AXES}, "ep": expert}


def _largest(rules: MeshConstraints, name: str, room: int) -> int | None:
    axis = rules.axis(name)
    if axis.divides is None:
        degree = room if axis.at_most is None else min(room, axis.at_most)
        return degree if degree >= axis.at_least else None
    fitting = axis.candidates(room)
    return fitting[-1] if fitting else None


def _expert(rules: MeshConstraints, axes: Mapping[str, int]) -> int | None:
    """The largest allowed expert degree that divides dp_shard x cp."""
    group = axes["dp_shard"] * axes["cp"]
    fitting = [degree for degree in rules.ep.candidates(group) if group % degree == 0]
    return fitting[-1] if fitting else None


def _lay_out(axes: dict[str, int], inner: int, nodes: Sequence[int]) -> MeshPlan:
    left = prod(axes[name] for name in WORLD_AXES) // inner
    used: list[int] = []
    for size in nodes:
        take = min(left, size // inner)
        left -= take
        used.append(take * inner)
    spares = tuple(size - taken for size, taken in zip(nodes, used, strict=True))
    parts = [f"{name} {axes[name]}" for name in WORLD_AXES if axes[name] > 1] or ["one rank"]
    reason = " x ".join(parts) + f" on {sum(used)} of {sum(nodes)} GPUs"
    if any(spares):
        reason += f"; {sum(spares)} spare, " + (
            f"since groups of {inner} stay inside a node" if inner > 1 else "which no mesh can use"
        )
    return MeshPlan(axes, tuple(used), spares, reason)


def _refusal(rules: MeshConstraints, nodes: Sequence[int], max_dp: int | None) -> ConfigError:
    wanted = ", ".join(
        f"{name} {rules.axis(name).limits()}" for name in AXES if rules.axis(name) != MeshConstraints().axis(name)
    )
    return ConfigError(
        f"No mesh fits on {sum(nodes)} GPUs in {len(nodes)} nodes with {wanted or 'these constraints'}",
        evidence="every combination of degrees that the constraints allow was tried"
        + (f", at most {max_dp} data-parallel" if max_dp else ""),
        remedy="allow a smaller degree, or give more GPUs",
    )
