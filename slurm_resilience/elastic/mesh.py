"""Which mesh fits on the GPUs that are left?

The best feasible one: most GPUs used, then fewest axes changed from the previous mesh, then most sharding.  What does not
fit is left over as spares, taken from the last nodes so that whole nodes become free.  Where nothing fits, the
error names the smallest change that would help.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from slurm_resilience.elastic.axes import AXES, MOST_GPUS, WORLD_AXES, MeshConstraints
from slurm_resilience.elastic.promising import Promising
from slurm_resilience.elastic.refusal import refusal
from slurm_resilience.elastic.shapes import Shape, shapes
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
        """Ranks in the mesh."""
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
    nodes = node_sizes(ranks, gpus_per_node)
    fitter = MeshFitter(rules, largest_node=max(nodes), gpus=sum(nodes), max_dp=max_dp, previous=previous)
    found = fitter.fit(Counter(nodes))
    if found is None:
        raise refusal(rules, nodes, max_dp, _fits)
    return _lay_out(*found, nodes, max_dp)


def node_sizes(ranks: int | None, gpus_per_node: int | Sequence[int] | None) -> list[int]:
    """GPUs of each node.  Raises :class:`ConfigError` when there are none."""
    if isinstance(gpus_per_node, Sequence):
        sizes = list(gpus_per_node)
    elif ranks is None or ranks < 1 or (gpus_per_node is not None and gpus_per_node < 1):
        raise ConfigError(
            f"A mesh cannot be planned for {ranks} ranks on nodes of {gpus_per_node or ranks}", remedy="give at least one rank"
        )
    else:
        size = gpus_per_node or ranks
        if ranks > MOST_GPUS:
            raise ConfigError(f"A mesh cannot be planned for {ranks} ranks", evidence=f"no cluster has {MOST_GPUS} GPUs")
        sizes = [size] * (ranks // size) + ([ranks % size] if ranks % size else [])
    if not sizes or max(sizes) < 1 or min(sizes) < 0:
        raise ConfigError("A mesh cannot be planned without GPUs", evidence=f"GPUs of each node: {sizes[:16]}")
    if sum(sizes) > MOST_GPUS:
        raise ConfigError(f"A mesh cannot be planned for {sum(sizes)} GPUs", evidence=f"no cluster has {MOST_GPUS}")
    return sizes


class MeshFitter:
    """The best mesh for many allocations of one experiment, none larger than ``gpus`` in nodes of ``largest_node``."""

    def __init__(
        self,
        rules: MeshConstraints,
        *,
        largest_node: int,
        gpus: int,
        max_dp: int | None = None,
        previous: Mapping[str, int] | None = None,
    ) -> None:
        self._shapes = Promising(shapes(rules, largest_node=largest_node, gpus=gpus, previous=previous), max_dp)
        self._max_dp = max_dp
        self._previous = previous

    def fit(self, sizes: Mapping[int, int]) -> tuple[dict[str, int], int] | None:
        """The axes, and how many ranks stay together inside a node, on nodes of ``sizes`` (GPUs → how many such nodes)."""
        best: tuple[tuple[int, ...], Shape, int] | None = None
        for shape in self._shapes.on(sizes, lambda shape: shape.product * (shape.fill(sizes, self._max_dp) or 0)):
            degree = shape.fill(sizes, self._max_dp)
            if degree is None or (best is not None and shape.product * degree < best[0][0]):
                continue
            key = self._worth(shape, degree)
            if best is None or key > best[0]:
                best = (key, shape, degree)
        if best is None:
            return None
        _, shape, degree = best
        axes = dict(shape.degrees)
        if shape.free is not None:
            axes[shape.free] = degree
        return {name: axes[name] for name in AXES}, shape.inner

    def _worth(self, shape: Shape, degree: int) -> tuple[int, ...]:
        axes = shape.degrees if shape.free is None else {**shape.degrees, shape.free: degree}
        same = sum(axes[name] == self._previous.get(name, 1) for name in AXES) if self._previous else 0
        return (shape.product * degree, same, axes["dp_shard"], axes["ep"], -axes["pp"] * axes["tp"])


def _fits(rules: MeshConstraints, sizes: Mapping[int, int], max_dp: int | None) -> bool:
    gpus = sum(size * count for size, count in sizes.items())
    return MeshFitter(rules, largest_node=max(sizes), gpus=gpus, max_dp=max_dp).fit(sizes) is not None


def _lay_out(axes: dict[str, int], inner: int, nodes: Sequence[int], max_dp: int | None) -> MeshPlan:
    left = prod(axes[name] for name in WORLD_AXES) // inner
    used: list[int] = []
    for size in nodes:
        take = min(left, size // inner)
        left -= take
        used.append(take * inner)
    spares = tuple(size - taken for size, taken in zip(nodes, used, strict=True))
    parts = [f"{name} {axes[name]}" for name in AXES if axes[name] > 1] or ["one rank"]
    reason = " x ".join(parts) + f" on {sum(used)} of {sum(nodes)} GPUs"
    if any(spares):
        reason += f"; {sum(spares)} spare: {_why_spare(axes, inner, nodes, max_dp)}"
    return MeshPlan(axes, tuple(used), spares, reason)


def _why_spare(axes: Mapping[str, int], inner: int, nodes: Sequence[int], max_dp: int | None) -> str:
    if max_dp is not None and axes["dp_replicate"] * axes["dp_shard"] == max_dp:
        return f"a global batch of {max_dp} has no sample for more data-parallel ranks"
    cut = sum(size % inner for size in nodes)
    if cut:
        return f"{cut} because groups of {inner} stay inside a node" if inner > 1 else "no larger mesh is allowed"
    return "no larger mesh is allowed"
