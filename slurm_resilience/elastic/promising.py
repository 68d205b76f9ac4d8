"""Of many shapes, which are worth a closer look on this allocation?

Where a user leaves several axes open there are thousands of shapes, and thousands of smaller allocations.  How many GPUs a
shape can use at most is a few operations on whole arrays; only those that could be the best are then filled one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slurm_resilience.elastic.shapes import Shape

_FEW = 64  # below this NumPy's start-up costs more than it saves
_NO_LIMIT = 1 << 40


class Promising:
    """The shapes of one experiment; ``max_dp`` bounds dp_replicate x dp_shard."""

    def __init__(self, shapes: Sequence[Shape], max_dp: int | None) -> None:
        self._shapes, self._max_dp = shapes, max_dp
        self._numbers: dict[str, Any] = {}
        if len(shapes) > _FEW:
            import numpy as np

            bounds = [1 if shape.free is None else shape.axis.most or _NO_LIMIT for shape in shapes]
            if max_dp is not None:
                bounds = [min(most, max_dp // shape.dp) for most, shape in zip(bounds, shapes, strict=True)]
            columns = {
                "inner": [shape.inner for shape in shapes],
                "product": [shape.product for shape in shapes],
                "step": [shape.step for shape in shapes],
                "most": bounds,
            }
            self._numbers = {name: np.array(column, dtype=np.int64) for name, column in columns.items()}

    def on(self, sizes: Mapping[int, int], used: Callable[[Shape], int]) -> Iterator[Shape]:
        """In any order, all shapes that might use the most GPUs on nodes of ``sizes`` (GPUs → how many such nodes).

        ``used`` says how many a shape uses really.
        """
        if not self._numbers:
            yield from self._shapes
            return
        import numpy as np

        inner, product, step, most = (self._numbers[name] for name in ("inner", "product", "step", "most"))
        blocks = sum(count * (size // inner) for size, count in sizes.items())
        degree = np.minimum(blocks * inner // product, most)
        bound = (degree - degree % step) * product
        best = used(self._shapes[int(bound.argmax())])
        for index in np.flatnonzero(bound >= max(best, 1)):
            yield self._shapes[int(index)]
