"""The random numbers that follow: exactly those of the saved run, or new ones that depend on nothing but numbers.

A state belongs to one rank of one world.  On the same world size each rank gets its own back; on another one
copying would give two ranks the same dropout, so every rank derives a fresh seed from (seed, step, rank, world).
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def capture() -> torch.Tensor:
    """The state of Python's, NumPy's, torch's and the accelerators' generators as bytes; draws nothing."""
    return torch.frombuffer(bytearray(json.dumps(_state()).encode()), dtype=torch.uint8)


def _state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": [version, list(words), gauss],
        "numpy": {**numpy_state, "state": {"key": numpy_state["state"]["key"].tolist(), "pos": numpy_state["state"]["pos"]}},
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(one) for one in torch.cuda.get_rng_state_all()] if _cuda_in_use() else [],
    }


def restore(blob: torch.Tensor) -> dict[str, Any]:
    """Put a captured state back, all of it; returns it.  Raises when a part is damaged or does not fit: then nothing can be
    trusted.
    """
    state: dict[str, Any] = json.loads(blob.numpy().tobytes())
    version, words, gauss = state["python"]
    numpy_state = state["numpy"]
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(numpy_state)
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_bytes(one) for one in state["cuda"]])
    return state


def derive(seed: int, step: int, rank: int, world: int) -> int:
    """A seed of 63 bits that differs between any two of its arguments; the same on every machine."""
    text = f"{seed},{step},{rank},{world}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"derived-rng").digest(), "big") >> 1


def reseed(seed: int) -> None:
    """Start all generators of this process from one seed."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


@contextmanager
def forked() -> Iterator[None]:
    """Whatever is drawn inside leaves the generators as they were."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if _cuda_in_use() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(own)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def label(step: int, rank: int, world: int) -> dict[str, Any]:
    """Whose generators these are, a digest of each, and one of all as they are captured; kept beside a captured state."""
    whose = {"step": step, "rank": rank, "world": world, "release": torch.__version__}
    return {**whose, "digests": digests(), "captured": _digest(json.dumps(_state()).encode())}


def digests() -> dict[str, str]:
    """One of each generator's whole state, as it is in force now."""
    return {name: _digest(json.dumps(part).encode()) for name, part in _state().items() if part}


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=12).hexdigest()


def disagreement(
    label: dict[str, Any], step: int, rank: int, world: int, blob: torch.Tensor, state: dict[str, Any]
) -> tuple[str, Any, Any] | None:
    """(what, as it was labelled, as it is) for the first thing in which the generators are not those of the label, after
    ``state`` was put back from ``blob``.

    Those of torch are compared within one release of it, because the form of their state changes.
    """
    whose = {"step": step, "rank": rank, "world": world}
    said = {name: label[name] for name in whose}
    if said != whose:
        return "whose state", whose, said
    if label.get("captured") == _digest(blob.numpy().tobytes()) and _in_force(state):
        return None
    now = digests()
    for name, then in label["digests"].items():
        same_form = name in ("python", "numpy") or label["release"] == torch.__version__
        if same_form and name in now and now[name] != then:
            return f"state of {name}", then, now[name]
    return None


def _in_force(state: dict[str, Any]) -> bool:
    """Whether all generators are, number by number, as this state says."""
    version, words, gauss = state["python"]
    said: Any = state["numpy"]
    now: Any = np.random.get_state(legacy=False)
    return (
        random.getstate() == (version, tuple(words), gauss)
        and {name: now[name] for name in ("bit_generator", "has_gauss", "gauss")}
        == {name: said[name] for name in ("bit_generator", "has_gauss", "gauss")}
        and now["state"]["pos"] == said["state"]["pos"]
        and np.array_equal(now["state"]["key"], said["state"]["key"])
        and _text(torch.get_rng_state()) == state["torch"]
        and (not state["cuda"] or not _cuda_in_use() or [_text(one) for one in torch.cuda.get_rng_state_all()] == state["cuda"])
    )


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
