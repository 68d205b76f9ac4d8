from __future__ import annotations

import collections
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import ConfigError
from slurm_resilience.training import plain

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(max_size=8)
keys = st.text(max_size=6) | st.integers(-9, 9) | st.just("$")
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.integers(0, 5), st.integers(1, 5), max_size=3).map(collections.Counter)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=12,
)


def through_json(value: object) -> object:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(plain.encode(value, "thing", tensors), allow_nan=False)
    return plain.decode(json.loads(text), tensors)


def same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(values)
def test_what_goes_in_comes_out_with_its_types(value: object) -> None:
    assert same(through_json(value), value)


def test_values_that_json_does_not_know() -> None:
    assert math.isnan(through_json(math.nan))  # type: ignore[arg-type]
    assert through_json(-math.inf) == -math.inf
    assert through_json(torch.bfloat16) is torch.bfloat16
    ring = through_json(collections.deque([1, 2, 3], maxlen=3))
    assert isinstance(ring, collections.deque)
    assert ring.maxlen == 3
    array = through_json(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.float32
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    array[0, 0] = 9  # its own memory, not a view of the text
    assert through_json(np.float64(0.1)) == 0.1


def test_tensors_go_beside_under_names_that_start_with_the_key() -> None:
    tensors: dict[str, torch.Tensor] = {}
    weight = torch.arange(3.0)
    encoded = plain.encode({"shadow": {"w": weight}, "n": (1, weight)}, "ema", tensors)
    assert sorted(tensors) == ["ema/n/1", "ema/shadow/w"]
    assert sorted(plain.tensor_keys(encoded)) == ["ema/n/1", "ema/shadow/w"]
    back = plain.decode(encoded, tensors)
    assert torch.equal(back["shadow"]["w"], weight)


def test_what_only_a_pickle_could_hold_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"loader/inner/0 is a builtins\.object"):
        plain.encode({"inner": [object()]}, "loader", {})
