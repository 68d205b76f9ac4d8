"""A sealed document gives back what was put in, or says that it is broken: never something else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.checkpoint import sealed

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@given(values)
def test_round_trip(value: object) -> None:
    assert same(sealed.unseal(sealed.seal(value)), value)


@given(values, st.data())
def test_one_changed_byte_is_seen(value: object, data: st.DataObject) -> None:
    raw = bytearray(sealed.seal(value))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(sealed.Broken):
        sealed.unseal(bytes(raw))


@given(values, st.data())
def test_a_torn_document_is_seen(value: object, data: st.DataObject) -> None:
    raw = sealed.seal(value)
    with pytest.raises(sealed.Broken):
        sealed.unseal(raw[: data.draw(st.integers(0, len(raw) - 1))])


def test_zeros_are_named_as_such() -> None:
    with pytest.raises(sealed.Broken, match="all zero"):
        sealed.unseal(bytes(400))
