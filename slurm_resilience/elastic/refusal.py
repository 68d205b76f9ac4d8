"""No mesh fits: what is the smallest change that would help?

Each kind of change is tried alone, the smallest first: more nodes, one axis smaller, an axis across nodes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from slurm_resilience.elastic.axes import AXES, Axis, MeshConstraints
from slurm_resilience.errors import ConfigError

Fits = Callable[[MeshConstraints, Mapping[int, int], int | None], bool]
_MOST_GPUS = 1 << 17
_LARGEST_NODE = 1 << 10
_NEAR = 64


def refusal(rules: MeshConstraints, nodes: Sequence[int], max_dp: int | None, fits: Fits) -> ConfigError:
    """The error for constraints that fit nowhere on ``nodes``, with the changes that would help, smallest first."""
    sizes = Counter(nodes)
    wanted = ", ".join(
        f"{name} {rules.axis(name).limits()}" for name in AXES if rules.axis(name) not in (Axis(fixed=1), Axis())
    )
    changes = [
        *_smaller_axes(rules, sizes, max_dp, fits),
        *_across_nodes(rules, sizes, max_dp, fits),
        *_more_nodes(rules, sizes, max_dp, fits),
    ]
    if max_dp is not None and fits(rules, sizes, None):
        changes.insert(0, _larger_batch(rules, sizes, max_dp, fits))
    return ConfigError(
        f"No mesh with {wanted or 'these constraints'} fits on {sum(nodes)} GPUs in {len(nodes)} node{'s' * (len(nodes) > 1)}",
        evidence=f"every mesh that the constraints allow was tried on nodes of {_listing(sizes)} GPUs"
        + (f", with at most {max_dp} data-parallel ranks (the global batch)" if max_dp is not None else ""),
        remedy="the smallest change that helps: " + ", or ".join(changes)
        if changes
        else "no single change helps: loosen several axes",
    )


def _listing(sizes: Mapping[int, int]) -> str:
    return ", ".join(f"{size}" if count == 1 else f"{size} (x{count})" for size, count in sorted(sizes.items(), reverse=True))


def _first(low: int, high: int, good: Callable[[int], bool]) -> int | None:
    """The smallest number in low..high that is good, where all above it are as well; None without any."""
    if not good(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle + 1, high)
    return low


def _smaller_axes(rules: MeshConstraints, sizes: Mapping[int, int], max_dp: int | None, fits: Fits) -> Iterator[str]:
    gpus = sum(size * count for size, count in sizes.items())
    for name in AXES:
        axis = rules.axis(name)
        least = axis.fixed or axis.at_least
        # What is near comes first; farther off, only the degrees that people use.
        start = min(least - 1, gpus)
        near = range(start, max(0, start - _NEAR), -1)
        far = [1 << power for power in range(max(0, start - _NEAR).bit_length() - 1, -1, -1)]
        for degree in (*near, *(one for one in far if one <= start - _NEAR)):
            if axis.divides is not None and axis.divides % degree:
                continue
            looser = dataclasses.replace(axis, fixed=degree if axis.fixed else None, at_least=min(axis.at_least, degree))
            if fits(dataclasses.replace(rules, **{name: looser}), sizes, max_dp):
                yield f"{name} {'' if axis.fixed else 'at least '}{degree} instead of {least}"
                break


def _across_nodes(rules: MeshConstraints, sizes: Mapping[int, int], max_dp: int | None, fits: Fits) -> Iterator[str]:
    inside = [name for name in AXES if rules.inside_node(name)]
    for name in inside:
        looser = dataclasses.replace(rules.axis(name), inside_node=False)
        if looser.most is not None and fits(dataclasses.replace(rules, **{name: looser}), sizes, max_dp):
            yield f'{name} across nodes ("{looser.most},out")'


def _more_nodes(rules: MeshConstraints, sizes: Mapping[int, int], max_dp: int | None, fits: Fits) -> Iterator[str]:
    size = max(sizes)
    more = _first(1, _MOST_GPUS // size, lambda count: fits(rules, {**sizes, size: sizes[size] + count}, max_dp))
    if more is not None:
        yield f"{more} more node{'s' * (more > 1)} of {size} GPUs"
        return
    larger = _first(size + 1, _LARGEST_NODE, lambda gpus: fits(rules, {gpus: sum(sizes.values())}, max_dp))
    if larger is not None:
        yield f"nodes of at least {larger} GPUs"


def _larger_batch(rules: MeshConstraints, sizes: Mapping[int, int], max_dp: int, fits: Fits) -> str:
    gpus = sum(size * count for size, count in sizes.items())
    batch = _first(max_dp + 1, max(gpus, max_dp + 1), lambda value: fits(rules, sizes, value))
    return f"a global batch of at least {batch}"
