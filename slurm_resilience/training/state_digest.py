"""Is the state that the ranks hold together the state that was saved, bit for bit, on whatever mesh?

Each rank sums the bits of what it has (see bit_sums.py) and says which box of which tensor that is; one gather joins them:
every box counts once, however many ranks hold a copy of it, and copies that differ are found on the way.  What comes out
depends on no world size and no placement, and is kept in the checkpoint, with the dtype and the whole shape of each tensor.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from slurm_resilience.checkpoint.errors import CorruptCheckpoint
from slurm_resilience.errors import FormatError
from slurm_resilience.training import bit_sums, prints

VERSION = 1
RANKS_OWN = "per_rank."
MOST_CHOICES = 256


class Row(NamedTuple):
    """One box of one tensor on one rank."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    sums: bit_sums.Sums
    print: str = ""


class Box(NamedTuple):
    """A part of a tensor, of which several ranks may hold copies."""

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class Copies:
    """Copies of one box that are not the same: which ranks hold which of them.  ``most`` is what most of them (or, if there
    is no majority, the lowest rank) hold."""

    box: Box
    dtype: str
    held: Mapping[bit_sums.Sums, tuple[int, ...]]
    most: bit_sums.Sums

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that hold something else than most."""
        return tuple(sorted(rank for sums, ranks in self.held.items() if sums != self.most for rank in ranks))

    @property
    def keeper(self) -> int:
        """The lowest rank that holds what most do."""
        return min(self.held[self.most])

    def __str__(self) -> str:
        odd = self.odd
        return f"{self.box.key} on {'rank' if len(odd) == 1 else 'ranks'} {', '.join(map(str, odd[:8]))}"


@dataclass(frozen=True)
class Joined:
    """What all ranks hold together: ``tensors`` by name as [dtype, shape, sums].

    ``boxes``: by name the parts of which there is a print, as [offset, size, print, sums, whether all numbers are finite].
    ``uneven``: what has not the same dtype and whole shape on all ranks that hold it, in words by name.
    """

    tensors: dict[str, list[Any]] = field(default_factory=dict)
    boxes: dict[str, list[list[Any]]] = field(default_factory=dict)
    differing: list[Copies] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    uneven: dict[str, str] = field(default_factory=dict)


def part_of(
    tensors: Mapping[str, torch.Tensor], *, known: Mapping[str, bit_sums.Sums] | None = None, printed: bool = False
) -> list[Row]:
    """What this rank holds of these tensors.  Changes nothing, talks to nobody.

    ``known``: sums of this rank's parts, by name; those parts are not read.  ``printed``: with prints, to be kept.
    """
    known = known or {}
    boxes, pieces = [], []
    words: dict[torch.dtype, str] = {}
    for key, tensor in tensors.items():
        dtype, shape = tensor.dtype, tuple(tensor.shape)
        word = words.get(dtype) or words.setdefault(dtype, str(dtype).removeprefix("torch."))
        for offset, local in local_boxes(tensor):
            boxes.append((key, word, shape, offset, tuple(local.shape)))
            if key not in known:
                pieces.append(bit_sums.Piece(local, offset, shape))
    summed = iter(bit_sums.sums(pieces))
    rows = [Row(*box, known[box[0]] if box[0] in known else next(summed)) for box in boxes]
    if printed:
        return [row._replace(print=prints.of(piece.local)) for row, piece in zip(rows, pieces, strict=True)]
    return rows


def local_boxes(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Where in the whole tensor this rank's part lies, and the part.  Source: as DCP asks a DTensor when it plans a save."""
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.dim(), tensor)]
    local = tensor.to_local()
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if not local.numel() or not chunks:
        return []
    (chunk,) = chunks
    return [(tuple(chunk.offsets), local)]


def join(parts: Sequence[Sequence[Row]], prefer: Iterable[Copies] = ()) -> Joined:
    """The parts of all ranks, in the order of ranks, as one.  Of copies that differ, what ``prefer`` says counts, else most."""
    if len(parts) == 1:  # no copies, one box a tensor
        (rows,) = parts
        return Joined(by_key(rows), _boxes(rows), [], [row.key for row in rows if not row.sums.finite])
    preferred = {one.box: one.most for one in prefer}
    held: dict[tuple[Any, ...], dict[bit_sums.Sums, list[int]]] = {}
    about: dict[str, tuple[str, tuple[int, ...]]] = {}
    printed: dict[tuple[Any, ...], Row] = {}
    out = Joined()
    for rank, rows in enumerate(parts):
        for row in rows:
            key, dtype, shape, offset, size, its, print_ = row
            if print_:
                printed[key, offset, size, its] = row
            first = about.setdefault(key, (dtype, shape))
            if first != (dtype, shape):
                out.uneven.setdefault(key, f"{_kind((dtype, shape))} on rank {rank}, {_kind(first)} on another")
            held.setdefault((key, offset, size), {}).setdefault(its, []).append(rank)
    sums: dict[str, bit_sums.Sums] = {}
    for place, copies in held.items():
        most = next(iter(copies))
        if len(copies) > 1:
            box = Box(*place)
            most = preferred.get(box) or max(copies, key=lambda one, c=copies: (len(c[one]), -c[one][0]))  # type: ignore[misc]
            frozen = {one: tuple(ranks) for one, ranks in copies.items()}
            out.differing.append(Copies(box, about[box.key][0], frozen, most))
        known = sums.get(place[0])
        sums[place[0]] = most if known is None else known + most
        if (of_most := printed.get((*place, most))) is not None:
            _add_box(out.boxes, of_most)
    for key, (dtype, shape) in about.items():
        out.tensors[key] = [dtype, list(shape), str(sums[key])]
        if not sums[key].finite:
            out.not_finite.append(key)
    return out


def judge(parts: Sequence[Sequence[Row]], recorded: Mapping[str, Sequence[Any]] | None) -> Joined:
    """:func:`join`, with the record as judge of copies that differ: those count with which the tensor is what it was."""
    joined = join(parts)
    by_name: dict[str, list[Copies]] = {}
    for one in joined.differing:
        by_name.setdefault(one.box.key, []).append(one)
    right: list[Copies] = []
    for key, copies in by_name.items():
        was = (recorded or {}).get(key, (None, None, None))[2]
        others = bit_sums.total(_counted(parts, key, {one.box for one in copies}))
        for choice in itertools.islice(itertools.product(*(one.held for one in copies)), MOST_CHOICES):
            if str(bit_sums.total((others, *choice))) == was:
                right += [replace(one, most=sums) for one, sums in zip(copies, choice, strict=True)]
                break
    return join(parts, prefer=right) if right else joined


def _counted(parts: Sequence[Sequence[Row]], key: str, without: set[Box]) -> list[bit_sums.Sums]:
    """The sums of a tensor's boxes, each once."""
    found = {Box(row.key, row.offset, row.size): row.sums for rows in parts for row in rows if row.key == key}
    return [sums for box, sums in found.items() if box not in without]


def _boxes(rows: Sequence[Row]) -> dict[str, list[list[Any]]]:
    found: dict[str, list[list[Any]]] = {}
    for row in rows:
        if row.print:
            _add_box(found, row)
    return found


def _add_box(boxes: dict[str, list[list[Any]]], row: Row) -> None:
    boxes.setdefault(row.key, []).append([list(row.offset), list(row.size), row.print, str(row.sums), row.sums.finite])


def by_key(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """One rank's own tensors, in the form of :attr:`Joined.tensors`."""
    return {row.key: [row.dtype, list(row.shape), str(row.sums)] for row in rows}


def kept(joined: Joined) -> dict[str, Any]:
    """What a checkpoint keeps."""
    return {"v": VERSION, "tensors": joined.tensors, "boxes": joined.boxes}


def watch(kept: Mapping[str, Any] | None, tensors: Mapping[str, torch.Tensor]) -> prints.Prints:
    """What finds out, during a load into ``tensors`` (a flat state dict), which sums are known without taking them."""
    boxes = (kept or {}).get("boxes")
    return prints.Prints(boxes, {key: box for key, tensor in tensors.items() for box in local_boxes(tensor)} if boxes else {})


def differences(was: Mapping[str, Sequence[Any]], tensors: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """What is not as recorded: the name of each such tensor, and how it differs."""
    wrong: dict[str, str] = {}
    if was == tensors:
        return wrong
    for key in sorted(was.keys() | tensors.keys()):
        if key not in tensors:
            wrong[key] = "is missing"
        elif key not in was:
            wrong[key] = "was not recorded"
        elif list(was[key][:2]) != list(tensors[key][:2]):
            wrong[key] = f"is {_kind(tensors[key])}, was {_kind(was[key])}"
        elif was[key][2] != tensors[key][2]:
            wrong[key] = "holds other bits"
    return wrong


def require_declared(recorded: Mapping[str, Any] | None, declared: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """The tensors that a checkpoint declares are, by name, dtype and shape, those whose digests it keeps.

    Raises :class:`CorruptCheckpoint` otherwise: such a checkpoint contradicts itself, whatever the model is.  Raises
    FormatError for a digest of a newer release.
    """
    if recorded is None:
        return
    if int(recorded["v"]) > VERSION:
        raise FormatError(
            f"The state digest of {name} was made by a newer release",
            evidence=f"its version is {recorded['v']}, we know up to {VERSION}",
            remedy="install that release of slurm-resilience",
        )
    if "tensors" not in recorded:
        return
    there = {key: [one["dtype"], list(one["shape"]), ""] for key, one in declared.items() if not key.startswith(RANKS_OWN)}
    wrong = differences({key: [*one[:2], ""] for key, one in recorded["tensors"].items()}, there)
    if wrong:
        raise CorruptCheckpoint(f"state digest: {sentence(wrong)}", evidence=f"the manifest of {name} against its own digest")


def sentence(wrong: Mapping[str, str], most: int = 5) -> str:
    """The differences in words, the first few by name."""
    shown = "; ".join(f"{key} {how}" for key, how in list(wrong.items())[:most])
    return shown + (f"; and {len(wrong) - most} more" if len(wrong) > most else "")


def ranks_that_differ(differing: Iterable[Copies]) -> list[int]:
    """Those whose copies are not what most hold, the most suspicious first."""
    return [rank for rank, _ in Counter(rank for one in differing for rank in one.odd).most_common()]


def _kind(one: Sequence[Any]) -> str:
    return f"{one[0]} {tuple(one[1])}"
