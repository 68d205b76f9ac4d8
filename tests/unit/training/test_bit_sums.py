"""The sums come out the same however a tensor is cut, and different whatever happens to it."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from slurm_resilience.training import bit_sums
from slurm_resilience.training.bit_sums import Piece, Sums

# Small, large, long and thin, wide, one-dimensional and no-dimensional ones: each kind is summed in its own way.
SHAPES = [(), (5,), (13, 39), (70, 30, 3, 3), (300, 401), (20_001,), (9000, 2), (2, 5000), (2, 300_000)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128]


def whole(tensor: torch.Tensor) -> Sums:
    (found,) = bit_sums.sums([Piece(tensor, (0,) * tensor.dim(), tuple(tensor.shape))])
    return found


def cut(tensor: torch.Tensor, cuts: list[list[int]]) -> Sums:
    spans = [list(zip([0, *at], [*at, size], strict=True)) for at, size in zip(cuts, tensor.shape, strict=True)]
    pieces = []
    for box in itertools.product(*spans):
        part = tensor
        for axis, (start, stop) in enumerate(box):
            part = part.narrow(axis, start, stop - start)
        pieces.append(Piece(part, tuple(start for start, _ in box), tuple(tensor.shape)))
    return bit_sums.total(bit_sums.sums(pieces))


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=dtype) if dtype.is_complex else (torch.randn(shape) * 9).to(dtype)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.data())
def test_cuts_do_not_matter(shape: tuple[int, ...], dtype: torch.dtype, data: Any) -> None:
    tensor = filled(shape, dtype)
    cuts = [sorted(data.draw(st.lists(st.integers(0, size), max_size=3))) for size in shape]
    assert cut(tensor, cuts) == whole(tensor)
    assert whole(tensor).finite


FORMAT = {
    # What version 1 of the digest gives for a count in this type and shape, and for one extreme number everywhere.
    ((5,), torch.float32): ["ffffffffdaa6fdbee1f90e4fc4b9d8de", "fffffffd82828280e263aac449028180"],
    ((13, 39), torch.int64): ["000135abd6c70742768b893af519818a", "80000000000000008000000000000000"],
    ((300, 401), torch.float32): ["ffffffff48ee87caac16f4fad20a41da", "ffff15f5e1e0f6006a6ddbe95e0e3100"],
    ((200001,), torch.bfloat16): ["000000002e09e2c702cb6352d191ed7f", "fffffffe7ae62080bffddca927971a80"],
    ((70000, 150), torch.int16): ["000000000e0f25960c3535b5ccca56fc", "ffffffafe4300000216466232c2e0000"],
    ((130, 70000), torch.uint8): ["00000000340960c65db4dd1ac4a0cd5e", "000000008a500520202f8a75d9eb9450"],
    ((2, 300000), torch.float32): ["00000004903eade250882bc07ecc2b28", "fffb70b87873e0008cc29c637c886a00"],
    ((40, 50, 60), torch.float64): ["093aad070f73ba600ca7bea8c6a443f8", "4b4b4b4b4b4a60006b7b14b5646d4800"],
}


@pytest.mark.parametrize(("shape", "dtype"), FORMAT, ids=str)
def test_the_sums_are_part_of_the_checkpoint_format(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also where many equal numbers are as large as they can be, and 32 bits might overflow on the way."""
    count = torch.Size(shape).numel()
    counted = (torch.arange(count) * 2654435761 + 12345).view(torch.uint8)[: count * dtype.itemsize].view(dtype)
    if dtype.is_floating_point:
        counted = counted.nan_to_num(1, 2, 3)
        least = torch.full((count * dtype.itemsize,), 128, dtype=torch.uint8).view(dtype)
    else:
        least = torch.full((count,), torch.iinfo(dtype).min if dtype.is_signed else torch.iinfo(dtype).max, dtype=dtype)
    assert [str(whole(each.reshape(shape))) for each in (counted, least)] == FORMAT[shape, dtype]


def flipped(tensor: torch.Tensor, place: int, bit: int) -> torch.Tensor:
    raw = tensor.clone().reshape(-1)
    raw.view(torch.int32)[place] ^= torch.tensor(-(1 << 31) if bit == 31 else 1 << bit, dtype=torch.int32)
    return raw.reshape(tensor.shape)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape)], ids=str)
def test_every_change_that_a_fault_makes_moves_the_sums(shape: tuple[int, ...]) -> None:
    tensor = filled(shape, torch.float32)
    before = whole(tensor)
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    changes = [
        swapped,
        tensor * 2,
        -tensor,
        tensor / 4,
        tensor.flip(0),
        tensor.roll(1, 0),
        torch.zeros_like(tensor),
        tensor.abs(),
    ]
    if len(shape) > 1:
        other = tensor.clone()
        other.select(1, 0).copy_(tensor.select(1, 1))
        other.select(1, 1).copy_(tensor.select(1, 0))
        changes += [other, tensor.flip(1)]
    last = tensor.numel() - 1
    changes += [flipped(tensor, place, bit) for place in (0, last // 2, last) for bit in (0, 22, 23, 30, 31)]
    changes += [flipped(flipped(tensor, 0, bit), last, bit) for bit in (0, 31)]
    for number, changed in enumerate(changes):
        assert whole(changed) != before, number


def test_what_is_not_finite_is_told_and_a_sum_that_overflows_is_not(tmp_path: Any) -> None:
    for shape in ((7,), (300, 401)):
        tensor = filled(shape, torch.float32)
        for odd in (float("nan"), float("inf"), float("-inf")):
            bad = tensor.clone()
            bad.reshape(-1)[-1] = odd
            assert not whole(bad).finite
        assert whole(torch.full(shape, 3e38)).finite
    small, other = bit_sums.sums([Piece(torch.tensor([torch.nan]), (0,), (1,)), Piece(torch.ones(3), (0,), (3,))])
    assert (small.finite, other.finite) == (False, True)


def test_what_cannot_be_seen_is_what_the_documentation_says() -> None:
    """The same amount at opposite corners of a rectangle, in a large tensor; small ones are summed by place and see it."""
    for shape, seen in (((300, 401), False), ((30, 40), True)):
        tensor = torch.arange(shape[0] * shape[1]).reshape(shape)
        forged = tensor.clone()
        for row, column, amount in ((1, 2, 5), (8, 9, 5), (1, 9, -5), (8, 2, -5)):
            forged[row, column] += amount
        assert (whole(forged) != whole(tensor)) is seen
