"""Two exact sums over the bits of a tensor that come out the same however it is cut: per element and by position.

Every element's bits, as an integer x at a place g of the whole tensor, add x to the first sum and w(g)·x to the second, modulo
2^64, so the sums of the parts add up to those of the whole.  w is odd everywhere: one flipped bit always moves both.

Up to ``SMALL`` elements w is a hash of the place itself.  Above, it is h(row) + k(column) (rows and columns of a grid laid over
tensors that are long and thin), which needs no product per element: two sums along the axes do.  A change that leaves every
row's and every column's sum as it was is then not seen: the same amount added at two opposite corners of a rectangle and
taken away at the other two.  Rows or columns that are swapped, scaled, negated, shifted or stale are.

Thirty-two bits summed modulo 2^32 would be three times as fast and blind to a doubled matrix (2^23 added to each of 2^10
elements of a row is nothing modulo 2^32), so elements are widened first, in blocks that stay in the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

SMALL = 1 << 12
THIN = 128
_GRID = 1024
BLOCK = 1 << 18
PACK = 1 << 18
_KEPT = 1 << 16
_MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Piece:
    """A tensor, or the box of it at ``offset`` that this rank has; ``shape`` is the whole tensor's."""

    local: torch.Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Sums:
    """Both sums modulo 2^64, and whether any floating-point number among the elements is NaN or infinite."""

    plain: int
    placed: int
    finite: bool = True

    def __add__(self, other: Sums) -> Sums:
        return Sums((self.plain + other.plain) & _MASK, (self.placed + other.placed) & _MASK, self.finite and other.finite)

    def __str__(self) -> str:
        return f"{self.plain:016x}{self.placed:016x}"


ZERO = Sums(0, 0)


def sums(pieces: Sequence[Piece]) -> list[Sums]:
    """The sums of each piece, in the order given.  Reads every element once from memory; changes nothing."""
    found: list[Sums] = [ZERO] * len(pieces)
    packs: dict[tuple[torch.device, torch.dtype], list[tuple[int, Piece]]] = {}
    later: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for place, one in enumerate(pieces):
            piece = _plain_numbers(one)
            if not piece.local.numel():
                continue
            if math.prod(piece.shape) <= SMALL:
                packs.setdefault((piece.local.device, piece.local.dtype), []).append((place, piece))
            else:
                later.append((place, *_large(piece)))
        for members in packs.values():
            for pack in _bounded(members):
                later += _small(pack)
        _collect(later, found, pieces)
    return found


def _collect(later: list[tuple[int, torch.Tensor, torch.Tensor]], found: list[Sums], pieces: Sequence[Piece]) -> None:
    """Fetch the results, once per device."""
    by_device: dict[torch.device, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
    for each in later:
        by_device.setdefault(each[1].device, []).append(each)
    for group in by_device.values():
        numbers = torch.stack([both for _, both, _ in group]).tolist()
        traces = torch.stack([trace for _, _, trace in group]).isfinite().tolist()
        for (place, _, _), (plain, placed), finite in zip(group, numbers, traces, strict=True):
            # A sum of finite numbers may still overflow; then the slow answer counts.
            fine = finite or bool(pieces[place].local.detach().isfinite().all())
            found[place] += Sums(plain & _MASK, placed & _MASK, fine)


def _plain_numbers(piece: Piece) -> Piece:
    """Complex elements as pairs, wide enough for an integer of their own each."""
    local = piece.local.detach()
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj().resolve_neg())
        return Piece(local.contiguous(), (*piece.offset, 0), (*piece.shape, 2))
    return Piece(local.contiguous(), piece.offset, piece.shape)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(_BITS[flat.dtype.itemsize])


def _trace(flat: torch.Tensor) -> torch.Tensor:
    """A number that is finite if all elements are (and hardly ever otherwise): one pass at the speed of memory."""
    if not flat.is_floating_point():
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    if flat.dtype.itemsize == 1:  # fp8 has no sum
        flat = flat.to(torch.float32)
    return flat.sum().to(torch.float64)


# -- small tensors: many in one go --------------------------------------------------------------------------------


def _bounded(members: list[tuple[int, Piece]]) -> Iterator[list[tuple[int, Piece]]]:
    pack: list[tuple[int, Piece]] = []
    size = 0
    for place, piece in members:
        pack.append((place, piece))
        size += piece.local.numel()
        if size >= PACK:
            yield pack
            pack, size = [], 0
    if pack:
        yield pack


def _small(pack: list[tuple[int, Piece]]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    flat = torch.cat([piece.local.reshape(-1) for _, piece in pack])
    weights = torch.cat([_weights(piece) for _, piece in pack])
    wide = _bits(flat).to(torch.int64)
    both = torch.stack([wide, wide * weights])
    ends = torch.tensor([piece.local.numel() for _, piece in pack]).cumsum(0).to(flat.device) - 1
    upto = both.cumsum(1)[:, ends]
    each = torch.cat([upto[:, :1], upto[:, 1:] - upto[:, :-1]], 1)
    trace = _trace(flat)
    for at, (place, _) in enumerate(pack):
        yield place, each[:, at], trace


def _weights(piece: Piece) -> torch.Tensor:
    """w at each place of the piece."""
    if tuple(piece.local.shape[1:]) == piece.shape[1:]:
        start = piece.offset[0] * math.prod(piece.shape[1:]) if piece.shape else 0
        return _odd(start, piece.local.numel(), 0, piece.local.device)
    places = _places(piece.offset, tuple(piece.local.shape), piece.shape, piece.local.device)
    return _odd(0, SMALL, 0, piece.local.device)[places]


def _places(offset: Sequence[int], size: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """The place of each element of a box in the whole tensor, counted row by row."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    for start, count, width in zip(offset, size, shape, strict=True):
        places = places.unsqueeze(-1) * width + torch.arange(start, start + count, device=device)
    return places.reshape(-1)


# -- large tensors: sums along the axes ---------------------------------------------------------------------------


def _large(piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    local = piece.local
    plain, placed = [], []
    for matrix, weight_rows, weight_columns in _matrices(piece):
        rows, columns = _axes(matrix)
        plain.append(rows.sum())
        placed += [(rows * weight_rows).sum(), (columns * weight_columns).sum()]
    return torch.stack([sum(plain[1:], plain[0]), sum(placed[1:], placed[0])]), _traces(local.reshape(-1))


def _matrices(piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The piece as matrices, with h of their rows (odd) and k of their columns (even)."""
    local, shape, device = piece.local, piece.shape, piece.local.device
    trailing = math.prod(shape[1:])
    whole_rows = tuple(local.shape[1:]) == shape[1:]
    if len(shape) > 1 and trailing >= THIN:
        rows = _odd(piece.offset[0], local.shape[0], 1, device)
        if whole_rows:
            columns = _even(0, trailing, 2, device)
        else:
            columns = _hash(_places(piece.offset[1:], local.shape[1:], shape[1:], device), 2) & ~1
        yield local.reshape(local.shape[0], -1), rows, columns
    elif whole_rows:
        yield from _on_grid(local.reshape(-1), piece.offset[0] * trailing)
    else:
        places = _places(piece.offset, local.shape, shape, device)
        both = (_hash(places // _GRID, 1) | 1) + (_hash(places % _GRID, 2) & ~1)
        yield local.reshape(-1, 1), both, torch.zeros(1, dtype=torch.int64, device=device)


def _on_grid(flat: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A run of elements that begins at place ``start``, on the grid: the end of a row, whole rows, the beginning of one."""
    while flat.numel():
        left = start % _GRID
        count = flat.numel() // _GRID * _GRID
        if left or not count:
            count = min(_GRID - left, flat.numel())
        width = min(count, _GRID)
        rows = _odd(start // _GRID, count // width, 1, flat.device)
        yield flat[:count].view(-1, width), rows, _even(left, width, 2, flat.device)
        start, flat = start + count, flat[count:]


def _axes(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of all rows and of all columns, modulo 2^64, of the elements' bits."""
    bits = _bits(matrix)
    height, width = bits.shape
    if bits.numel() <= BLOCK:
        wide = bits.to(torch.int64)
        return wide.sum(1), wide.sum(0)
    rows = torch.zeros(height, dtype=torch.int64, device=bits.device)
    along = torch.zeros(width, dtype=torch.int64, device=bits.device)
    wide_columns = min(width, BLOCK)
    at_once = max(1, BLOCK // wide_columns)
    space = torch.empty(at_once * wide_columns, dtype=torch.int64, device=bits.device)
    for left in range(0, width, wide_columns):
        right = min(left + wide_columns, width)
        for top in range(0, height, at_once):
            bottom = min(top + at_once, height)
            wide = space[: (bottom - top) * (right - left)].view(bottom - top, right - left)
            wide.copy_(bits[top:bottom, left:right])
            rows[top:bottom] += wide.sum(1)
            along[left:right] += wide.sum(0)
    return rows, along


def _traces(flat: torch.Tensor) -> torch.Tensor:
    blocks = [_trace(block) for block in torch.split(flat, 16 * BLOCK)]
    return sum(blocks[1:], blocks[0])


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
