"""Two exact sums over the bits of a tensor that come out the same however it is cut: per element and by position.

Every element's bits, as an integer x at a place g of the whole tensor, add x to the first sum and w(g)·x to the second, modulo
2^64, so the sums of the parts add up to those of the whole.  w is odd everywhere: one flipped bit always moves both.

Up to ``SMALL`` elements w is a hash of the place itself.  Above, it is h(row) + k(column) (rows and columns of a grid laid over
tensors that are long and thin), which needs no product per element: two sums along the axes do.  A change that leaves every
row's and every column's sum as it was is then not seen: the same amount added at two opposite corners of a rectangle and
taken away at the other two.  Rows or columns that are swapped, scaled, negated, shifted or stale are.

Thirty-two bits summed modulo 2^32 would be three times as fast and blind to a doubled matrix (2^23 added to each of 2^10
elements of a row is nothing modulo 2^32), so elements are widened first, in blocks that stay in a core's own cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

SMALL = 1 << 12
THIN = 128
_GRID = 1024
BLOCK = 1 << 16
DEVICE_BLOCK = 1 << 22
_TOGETHER = 1 << 18
_HELD = 1 << 18
_APART = 8
_KEPT = 1 << 16
_MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Piece(NamedTuple):
    """A tensor, or the box of it at ``offset`` that this rank has; ``shape`` is the whole tensor's."""

    local: torch.Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Sums(NamedTuple):
    """Both sums modulo 2^64, and whether any floating-point number among the elements is NaN or infinite."""

    plain: int
    placed: int
    finite: bool = True

    def __add__(self, other: Sums) -> Sums:  # type: ignore[override]
        return Sums((self.plain + other.plain) & _MASK, (self.placed + other.placed) & _MASK, self.finite and other.finite)

    def __str__(self) -> str:
        return f"{self.plain:016x}{self.placed:016x}"


ZERO = Sums(0, 0)


def sums(pieces: Sequence[Piece]) -> list[Sums]:
    """The sums of each piece, in the order given.  Reads every element once from memory; changes nothing.

    Pieces of one kind and one place in their tensors (a weight and its moments, the same layer many times) go together, so that
    what a call costs is paid once for all of them.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, (local, offset, shape) in enumerate(pieces):
        if local.numel():
            alike.setdefault((local.dtype, local.shape, offset, shape, local.device), []).append(place)
    order: dict[torch.device, list[int]] = {}
    running: dict[torch.device, _Running] = {}
    for (_, size, _, _, device), places in alike.items():
        at_once = max(1, _TOGETHER // math.prod(size))
        for first in range(0, len(places), at_once):
            some = places[first : first + at_once]
            running.setdefault(device, _Running()).add([pieces[place] for place in some])
            order.setdefault(device, []).extend(some)
    found: list[Sums] = [ZERO] * len(pieces)
    for device, places in order.items():
        for place, its in zip(places, running[device].sums(), strict=True):
            found[place] = its
    return found


class _Running:
    """The sums of pieces on one device; what can be done for many of them at once is put off until it can."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._groups: dict[tuple[Any, ...], _Group] = {}
        self._held = 0
        self._done: list[tuple[list[int], _Three]] = []

    def add(self, alike: Sequence[Piece]) -> None:
        """Read pieces of one kind and one place in their tensors."""
        places = list(range(len(self._pieces), len(self._pieces) + len(alike)))
        self._pieces += alike
        members = [piece.local.detach() for piece in alike]
        _, offset, shape = alike[0]
        if members[0].is_complex():  # as pairs, wide enough for an integer of their own each
            members = [torch.view_as_real(one.resolve_conj().resolve_neg()) for one in members]
            offset, shape = (*offset, 0), (*shape, 2)
        size, device = tuple(members[0].shape), members[0].device
        with torch.no_grad():
            flat = torch.stack(members).reshape(len(members), -1) if len(members) > 1 else members[0].reshape(1, -1)
            if math.prod(shape) <= SMALL:
                self._done.append((places, _small(flat, size, offset, shape)))
                return
            key = (flat.dtype, size, offset, shape)
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = _Group([], [], _matrices(size, offset, shape, device))
            axes = [_axes(flat[:, one.start : one.stop].reshape(len(flat), -1, one.width)) for one in group.matrices]
            group.places.extend(places)
            group.axes.append(axes)
            self._held += sum(rows.numel() + columns.numel() for rows, columns, _ in axes)
            if self._held > _HELD:
                self._weigh()

    def _weigh(self) -> None:
        """Turn the sums along the axes that were kept so far into the two sums of each piece."""
        for group in self._groups.values():
            self._done.append((group.places, _weighed(group)))
        self._groups.clear()
        self._held = 0

    def sums(self) -> list[Sums]:
        """The sums of each piece, in the order they came."""
        with torch.no_grad():
            self._weigh()
            if not self._done:
                return []
            places = [place for some, _ in self._done for place in some]
            plain, placed, traces = (torch.cat([its[part] for _, its in self._done]) for part in range(3))
            found = [ZERO] * len(places)
            for place, one, other, fine in zip(
                places, plain.tolist(), placed.tolist(), traces.isfinite().tolist(), strict=True
            ):
                # A sum of finite numbers may still overflow; then the slow answer counts.
                good = fine or bool(self._pieces[place].local.detach().isfinite().all())
                found[place] = Sums(one & _MASK, other & _MASK, good)
            return found


_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of several pieces or matrices: two sums of each, and a number for each that is finite if all its elements are."""


class _Matrix(NamedTuple):
    """A run of a piece's elements as rows of one width, with h of the rows (odd) and k of the columns (even)."""

    start: int
    stop: int
    width: int
    rows: torch.Tensor
    columns: torch.Tensor


class _Group(NamedTuple):
    """Pieces that are cut into the same matrices; ``axes``: of one or several pieces, their matrices' sums along the axes."""

    places: list[int]
    axes: list[list[_Three]]
    matrices: list[_Matrix]


def _weighed(group: _Group) -> _Three:
    plain, placed, traces = [], [], []
    for number, matrix in enumerate(group.matrices):
        rows, columns, trace = (torch.cat([axes[number][part] for axes in group.axes]) for part in range(3))
        plain.append(rows.sum(1))
        placed += [(rows * matrix.rows).sum(1), (columns * matrix.columns).sum(1)]
        traces.append(trace)
    return sum(plain[1:], plain[0]), sum(placed[1:], placed[0]), sum(traces[1:], traces[0])


def _block(device: torch.device) -> int:
    """Elements to sum at once: what stays in a core's own cache; elsewhere, what keeps the device busy."""
    return BLOCK if device.type == "cpu" else DEVICE_BLOCK


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(_BITS[flat.dtype.itemsize])


def _trace(numbers: torch.Tensor) -> torch.Tensor:
    """A number that is finite if all elements are (and hardly ever otherwise)."""
    if not numbers.is_floating_point():
        return torch.zeros((), device=numbers.device)
    if numbers.dtype.itemsize == 1:  # fp8 has no sum
        numbers = numbers.to(torch.float32)
    return numbers.sum()


# -- small tensors: a weight for each element ---------------------------------------------------------------------


def _small(flat: torch.Tensor, size: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> _Three:
    wide = _bits(flat).to(torch.int64)
    trace = _trace(flat).to(torch.float64).expand(len(flat))
    return wide.sum(1), (wide * _weights(size, offset, shape, flat.device)).sum(1), trace


def _weights(size: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """w at each place of a piece."""
    if size[1:] == shape[1:]:
        start = offset[0] * math.prod(shape[1:]) if shape else 0
        return _odd(start, math.prod(size), 0, device)
    return _odd(0, SMALL, 0, device)[_places(offset, size, shape, device)]


def _places(offset: Sequence[int], size: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """The place of each element of a box in the whole tensor, counted row by row."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    for start, count, width in zip(offset, size, shape, strict=True):
        places = places.unsqueeze(-1) * width + torch.arange(start, start + count, device=device)
    return places.reshape(-1)


# -- large tensors: sums along the axes ---------------------------------------------------------------------------


def _matrices(size: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], device: torch.device) -> list[_Matrix]:
    """How a piece is cut into matrices."""
    trailing, count = math.prod(shape[1:]), math.prod(size)
    whole_rows = size[1:] == shape[1:]
    if len(shape) > 1 and trailing >= THIN:
        rows = _odd(offset[0], size[0], 1, device)
        if whole_rows:
            columns = _even(0, trailing, 2, device)
        else:
            columns = _hash(_places(offset[1:], size[1:], shape[1:], device), 2) & ~1
        return [_Matrix(0, count, count // size[0], rows, columns)]
    if whole_rows:
        return list(_on_grid(offset[0] * trailing, count, device))
    places = _places(offset, size, shape, device)
    both = (_hash(places // _GRID, 1) | 1) + (_hash(places % _GRID, 2) & ~1)
    return [_Matrix(0, count, 1, both, torch.zeros(1, dtype=torch.int64, device=device))]


def _on_grid(first: int, count: int, device: torch.device) -> Iterator[_Matrix]:
    """A run of elements that begins at place ``first``, on the grid: the end of a row, whole rows, the beginning of one."""
    at = 0
    while at < count:
        left = (first + at) % _GRID
        some = (count - at) // _GRID * _GRID
        if left or not some:
            some = min(_GRID - left, count - at)
        width = min(some, _GRID)
        rows = _odd((first + at) // _GRID, some // width, 1, device)
        yield _Matrix(at, at + some, width, rows, _even(left, width, 2, device))
        at += some


def _axes(matrices: torch.Tensor) -> _Three:
    """The sums of all rows and of all columns of each matrix, modulo 2^64, of the elements' bits; and their traces.

    A block is read from memory once; all that follows finds it in the cache.
    """
    bits, block = _bits(matrices), _block(matrices.device)
    if len(bits) > 1 or bits.numel() <= block:
        wide = bits.to(torch.int64)
        return wide.sum(2), wide.sum(1), _trace(matrices).to(torch.float64).expand(len(bits))
    height, width = bits.shape[1:]
    stripe = min(width, block)
    at_once = min(height, max(1, block // stripe))
    tall = -(-height // at_once)
    # 2^16 numbers of 16 bits add up to 32.
    kind = torch.int32 if bits.dtype.itemsize <= 2 and max(at_once, stripe) <= 1 << 16 else torch.int64
    # Rows that lie a power of two apart share one set of the cache's lines, and a sum down a column is half as fast.
    space = torch.empty((at_once, stripe + (_APART if stripe >= THIN else 0)), dtype=kind, device=bits.device)
    down = torch.empty((tall, stripe), dtype=kind, device=bits.device)
    rows, columns, traces = [], [], []
    for numbers, raw in zip(torch.split(matrices[0], stripe, 1), torch.split(bits[0], stripe, 1), strict=True):
        along = torch.empty(height, dtype=kind, device=bits.device)
        wide, below = space[:, : raw.shape[1]], down[:, : raw.shape[1]]
        room = [wide] * (tall - 1) + [wide[: height - (tall - 1) * at_once]]
        split = (*(torch.split(each, at_once) for each in (numbers, raw, along)), below.unbind(), room)
        for some, these, into_rows, into_columns, widened in zip(*split, strict=True):
            traces.append(_trace(some))  # the first to read them, since it waits least for the memory
            widened.copy_(these)
            torch.sum(widened, 1, dtype=kind, out=into_rows)
            torch.sum(widened, 0, dtype=kind, out=into_columns)
        rows.append(along if kind == torch.int64 else along.to(torch.int64))
        columns.append(below.sum(0))
    trace = torch.stack(traces).to(torch.float64).sum()
    if len(rows) == 1:
        return rows[0].unsqueeze(0), columns[0].unsqueeze(0), trace.unsqueeze(0)
    return sum(rows[1:], rows[0]).unsqueeze(0), torch.cat(columns).unsqueeze(0), trace.unsqueeze(0)


# -- hashes -------------------------------------------------------------------------------------------------------


def _odd(start: int, count: int, salt: int, device: torch.device) -> torch.Tensor:
    return _run(start, count, salt, 1, device)


def _even(start: int, count: int, salt: int, device: torch.device) -> torch.Tensor:
    return _run(start, count, salt, 0, device)


def _run(start: int, count: int, salt: int, lowest: int, device: torch.device) -> torch.Tensor:
    """Hashes of a run of places, their lowest bit as given; short tables are kept."""
    stop = start + count
    if stop <= _KEPT:
        return _table(max(_GRID, 1 << (stop - 1).bit_length()), salt, lowest, device)[start:stop]
    return _hash(torch.arange(start, stop, device=device), salt) & ~1 | lowest


@functools.lru_cache(maxsize=64)
def _table(size: int, salt: int, lowest: int, device: torch.device) -> torch.Tensor:
    return _hash(torch.arange(size, device=device), salt) & ~1 | lowest


def _hash(places: torch.Tensor, salt: int) -> torch.Tensor:
    """A hash of each place.  Source: splitmix64 (Steele, Lea, Flood, OOPSLA 2014), whose output function this is."""
    mixed = places * _signed(0x9E3779B97F4A7C15) + _signed((salt + 1) * 0xD1342543DE82EF95 & _MASK)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> shift & (1 << (64 - shift)) - 1)) * _signed(factor)
    return mixed


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def total(parts: Iterable[Sums]) -> Sums:
    """The sums of a whole out of those of its parts."""
    return functools.reduce(lambda one, other: one + other, parts, ZERO)
