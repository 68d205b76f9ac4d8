"""[torch] What belongs to one rank alone (RNG, above all): stored under keys that carry the rank, asked for only by that rank.

They are restored when the world has the size that saved them, on all ranks or on none; otherwise every rank derives its own.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

TOP = "per_rank"
_JSON = "json"


def top_of(key: str) -> str:
    """The part of the state that a flattened key belongs to: what stands before its first dot or slash."""
    return re.split(r"[./]", key, maxsplit=1)[0]


def is_own(key: str) -> bool:
    """Whether a flattened key is some rank's own."""
    return key == TOP or key.startswith(f"{TOP}.")


def _label(rank: int) -> str:
    return f"rank{rank:05d}"


def add(state_dict: dict[str, Any], own: dict[str, Any], rank: int) -> dict[str, Any]:
    """``state_dict`` with this rank's own values: tensors as they are, the rest as JSON in one byte tensor."""
    if TOP in state_dict:
        raise ValueError(f"{TOP!r} is the name of what ranks keep for themselves; call this part of the state otherwise")
    if not own:
        return state_dict
    mine: dict[str, Any] = {f"t:{name}": value for name, value in own.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in own.items() if not isinstance(value, torch.Tensor)}
    mine[_JSON] = torch.frombuffer(bytearray(json.dumps(rest).encode()), dtype=torch.uint8)
    return {**state_dict, TOP: {_label(rank): mine}}


def ask(state_dict: dict[str, Any], saved: Metadata, rank: int, world: int) -> bool:
    """Add empty places for this rank's own values, when all ranks of a world of this size have saved some.

    Every rank comes to the same answer, since it depends on the checkpoint and the world size alone.
    """
    owners = {key.split(".")[1] for key in saved.state_dict_metadata if is_own(key)}
    if owners != {_label(each) for each in range(world)}:
        return False
    prefix = f"{TOP}.{_label(rank)}."
    mine: dict[str, Any] = {}
    for key, about in saved.state_dict_metadata.items():
        if key.startswith(prefix) and isinstance(about, TensorStorageMetadata):
            mine[key.removeprefix(prefix)] = torch.empty(about.size, dtype=about.properties.dtype)
    state_dict[TOP] = {_label(rank): mine}
    return True


def take(state_dict: dict[str, Any]) -> dict[str, Any]:
    """This rank's own values as they were given to the save, taken out of the loaded ``state_dict``."""
    (mine,) = state_dict.pop(TOP).values()
    raw = mine.pop(_JSON)
    out: dict[str, Any] = json.loads(bytes(raw.numpy()))
    out.update({name.removeprefix("t:"): value for name, value in mine.items()})
    return out
