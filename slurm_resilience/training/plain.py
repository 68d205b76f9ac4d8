"""State of any shape as JSON plus named tensors, and back; never a pickle.

Schedulers, scalers, samplers and optimizer groups keep numbers, strings and nested containers.  JSON alone would turn
tuples into lists and the keys of a ``Counter`` into strings, so what JSON cannot say carries a tag: ``{"$": "tuple", …}``.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slurm_resilience.errors import ConfigError

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def encode(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON for ``value``; its tensors go into ``tensors`` under names that start with ``key``.

    Raises :class:`ConfigError` for a value that only a pickle could hold, with the place where it is.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensors[key] = value.detach()
        return {"$": "tensor", "v": key}
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$": "float", "v": str(value)}
    if type(value) is list:
        return [encode(one, f"{key}/{place}", tensors) for place, one in enumerate(value)]
    if type(value) is dict and "$" not in value and all(type(name) is str for name in value):
        return {name: encode(one, f"{key}/{name}", tensors) for name, one in value.items()}
    return _tagged(value, key, tensors)


def _tagged(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    if isinstance(value, torch.Size) or type(value) is tuple:
        return {"$": "tuple", "v": [encode(one, f"{key}/{place}", tensors) for place, one in enumerate(value)]}
    if isinstance(value, dict) and type(value) in _MAPPINGS:
        pairs = [
            [encode(name, f"{key}/{place}.key", tensors), encode(one, f"{key}/{place}", tensors)]
            for place, (name, one) in enumerate(value.items())
        ]
        return {"$": _MAPPINGS[type(value)], "v": pairs}
    if type(value) in (set, frozenset):
        parts = sorted(value, key=repr)
        return {"$": type(value).__name__, "v": [encode(one, f"{key}/{place}", tensors) for place, one in enumerate(parts)]}
    if type(value) is collections.deque:
        parts = [encode(one, f"{key}/{place}", tensors) for place, one in enumerate(value)]
        return {"$": "deque", "v": parts, "maxlen": value.maxlen}
    if type(value) is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {"$": type(value).__name__, "v": str(value)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        raw = base64.b64encode(array.tobytes()).decode()
        kind = "ndarray" if isinstance(value, np.ndarray) else "numpy"
        return {"$": kind, "v": raw, "dtype": array.dtype.str, "shape": list(value.shape)}
    raise ConfigError(
        f"The state of {key.split('/')[0]!r} cannot be kept in a checkpoint",
        evidence=f"{key} is a {type(value).__module__}.{type(value).__qualname__}; numbers, strings, containers, arrays and "
        "tensors are kept, and nothing that only a pickle could hold",
        remedy="let its state_dict() return such values only",
    )


_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "OrderedDict",
    collections.Counter: "Counter",
    collections.defaultdict: "dict",
}
_BUILD: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "dtype": _DTYPES.__getitem__,
    "device": torch.device,
}
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
}


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The value that :func:`encode` was given.  Raises ``KeyError`` for a tensor that is missing or an unknown tag."""
    if isinstance(value, list):
        return [decode(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    tag = value.get("$")
    if tag is None:
        return {name: decode(one, tensors) for name, one in value.items()}
    inner = value["v"]
    if tag == "tensor":
        return tensors[inner]
    if tag == "deque":
        return collections.deque((decode(one, tensors) for one in inner), maxlen=value["maxlen"])
    if tag in ("ndarray", "numpy"):
        array = np.frombuffer(base64.b64decode(inner), dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return array if tag == "ndarray" else array[()]
    if tag in _BUILD:
        return _BUILD[tag](inner)
    return _CONTAINERS[tag](decode(inner, tensors))


def tensor_keys(value: Any) -> list[str]:
    """The names of the tensors that an encoded value refers to."""
    if isinstance(value, list):
        return [key for one in value for key in tensor_keys(one)]
    if not isinstance(value, dict):
        return []
    if value.get("$") == "tensor":
        return [value["v"]]
    return [key for one in value.values() for key in tensor_keys(one)]
