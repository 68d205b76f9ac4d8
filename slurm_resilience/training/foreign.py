"""Weights in files that are not ours: ``.pt`` and safetensors, one file or a folder as Hugging Face writes them.

Nothing of a file is executed: pickles are read with torch's ``weights_only``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slurm_resilience._atomic import fsync_dir
from slurm_resilience.errors import ConfigError

PICKLED = frozenset({".pt", ".pth", ".bin", ".ckpt"})
SAFE = ".safetensors"
# Where training scripts keep the model inside of a file that holds more.
_USUAL_KEYS = ("model", "state_dict", "model_state_dict", "module", "weights")
_SINGLE = ("model.safetensors", "pytorch_model.bin")


def read_weights(path: str | os.PathLike[str], key: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors in ``path`` by name, on the CPU, mapped rather than read where the format allows.

    ``key`` names the part that holds the model in a file that holds more ("model", "checkpoint.weights"), or what its names
    begin with ("state_dict.net": Lightning's, of a module that keeps the model in ``self.net``); in safetensors there are only
    names.  Without it the usual parts are tried.  Raises :class:`ConfigError` for what is missing, is no such
    file, or is more than tensors.
    """
    path = Path(path)
    out: dict[str, torch.Tensor] = {}
    for file in _files(path):
        try:
            out.update(_read_safe(file, key) if file.suffix == SAFE else _read_pickled(file, key))
        except OSError as error:
            raise ConfigError(f"{file} cannot be read", evidence=str(error)) from error
    if key is not None and not out:
        raise ConfigError(f"{path} has no {key!r}", evidence=f"no name in it begins with {key}.")
    return out


def _files(path: Path) -> list[Path]:
    try:
        path.stat()
    except (OSError, ValueError) as error:
        gone = isinstance(error, FileNotFoundError) and not path.is_symlink()
        raise ConfigError(f"There are no weights at {path}", evidence="nothing is there" if gone else str(error)) from error
    if not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"{path} is no file", evidence="it is a pipe, a socket or a device")
        if path.suffix not in PICKLED and path.suffix != SAFE:
            raise ConfigError(
                f"{path} is no file of weights that we know",
                evidence=f"it ends in {path.suffix or 'nothing'}; known are {', '.join(sorted(PICKLED | {SAFE}))}",
            )
        return [path]
    for index in (path / f"{name}.index.json" for name in _SINGLE):
        if index.is_file():
            return [path / name for name in _listed(index)]
    single = [path / name for name in _SINGLE if (path / name).is_file()]
    if not single:
        raise ConfigError(
            f"The folder {path} holds no weights",
            evidence=f"it has neither {_SINGLE[0]} nor {_SINGLE[1]}, nor an index of several",
            remedy="give the file itself, or a folder as save_pretrained() writes it",
        )
    return single[:1]


def _listed(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        strays = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(f"{index} does not say which files hold the weights", evidence=repr(error)) from error
    if strays or not names:
        raise ConfigError(f"{index} names files outside of its folder, or none", evidence=repr(strays[:3]))
    return names


def _read_safe(file: Path, key: str | None) -> dict[str, torch.Tensor]:
    """The tensors of a file; with ``key`` those below that name, as the format knows nothing deeper than names."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ConfigError(f"{file} needs the package safetensors", remedy="pip install safetensors") from error
    try:
        held = load_file(file, device="cpu")
    except SafetensorError as error:
        raise ConfigError(f"{file} is no whole safetensors file", evidence=str(error)) from error
    if key is None:
        return dict(held)
    return {name.removeprefix(f"{key}."): value for name, value in held.items() if name.startswith(f"{key}.")}


def _read_pickled(file: Path, key: str | None) -> dict[str, torch.Tensor]:
    try:
        held = _unpickled(file)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{file} holds more than tensors and plain values, or is no file of torch.save()",
            evidence=" ".join(str(error).split())[:300],
            remedy="where you trust it, load it once and torch.save(model.state_dict(), …) into a file of its own",
        ) from error
    except OSError:
        raise
    except Exception as error:  # a torn pickle makes torch raise anything, KeyError among others
        raise ConfigError(f"{file} is no whole file of torch.save()", evidence=" ".join(repr(error).split())[:300]) from error
    return _model_in(held, file, key)


def _unpickled(file: Path) -> Any:
    with contextlib.suppress(RuntimeError):  # the format of before torch 1.6 cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(file, map_location="cpu", weights_only=True)


def _model_in(held: Any, file: Path, key: str | None) -> dict[str, torch.Tensor]:
    if key is not None:
        words = key.split(".")
        for at, word in enumerate(words):
            begins = ".".join(words[at:]) + "."
            if isinstance(held, Mapping) and word not in held:
                below = {name[len(begins) :]: held[name] for name in held if isinstance(name, str) and name.startswith(begins)}
                if _is_state(below):
                    return below
            if not isinstance(held, Mapping) or word not in held:
                raise ConfigError(f"{file} has no {key!r}", evidence=f"at {word!r} there is: {_keys(held)}")
            held = held[word]
        if not _is_state(held):
            raise ConfigError(f"{key!r} in {file} is no model's state", evidence=_why_no_state(held))
        return dict(held)
    if _is_state(held):
        return dict(held)
    for usual in _USUAL_KEYS:
        if isinstance(held, Mapping) and _is_state(held.get(usual)):
            return dict(held[usual])
    raise ConfigError(f"Which part of {file} is the model?", evidence=f"it holds {_keys(held)}", remedy="name it: key='…'")


def _is_state(held: Any) -> bool:
    return (
        isinstance(held, Mapping)
        and bool(held)
        and all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in held.items())
    )


def _why_no_state(held: Any) -> str:
    odd = [f"{name!r} is a {type(value).__name__}" for name, value in _items(held) if not isinstance(value, torch.Tensor)]
    tensors = len(_items(held)) - len(odd)
    return f"beside {tensors} tensors, {', '.join(odd[:3])}" if tensors and odd else f"it holds {_keys(held)}"


def _items(held: Any) -> list[tuple[Any, Any]]:
    return list(held.items()) if isinstance(held, Mapping) else []


def _keys(held: Any) -> str:
    if isinstance(held, Mapping) and not held:
        return "nothing"
    if not isinstance(held, Mapping):
        return f"a {type(held).__name__}"
    return ", ".join(repr(name) for name in list(held)[:8]) + ", …" * (len(held) > 8)


def require_format(path: Path) -> None:
    """Raises :class:`ConfigError` when the suffix of ``path`` is no format that :func:`write_weights` writes."""
    if path.suffix != SAFE and path.suffix not in PICKLED:
        raise ConfigError(
            f"{path.name} does not say which format is wanted", remedy=f"end it in {SAFE}, or in {', '.join(sorted(PICKLED))}"
        )


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> int:
    """Write tensors where nobody sees half of them; the bytes written.  The suffix of ``path`` is the format.

    ``about`` goes into a safetensors file's header.  Raises :class:`ConfigError` for another suffix, for a kind of numbers
    that the format does not know, and where there is no room.
    """
    require_format(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask has it: safetensors writes files that nobody else may read
        if path.suffix == SAFE:
            _write_safe(temporary, tensors, about)
        else:
            _write_pickled(temporary, tensors)
        os.chmod(temporary, mode & 0o777)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        size = temporary.stat().st_size
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)
    return size


def _no_room(file: Path, error: Exception) -> ConfigError:
    # neither library keeps the errno of a failed write
    return ConfigError(
        f"The weights could not be written in {file.parent}",
        evidence=" ".join(str(error).split())[:300],
        remedy="nothing was left there; see that its file system has room for all of the model",
    )


def _write_pickled(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    try:
        torch.save(dict(tensors), file)
    except RuntimeError as error:
        raise _no_room(file, error) from error


def _write_safe(file: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> None:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError(
            f"{SAFE} needs the package safetensors", remedy="pip install safetensors, or export to .pt"
        ) from error
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt", **about})
    except KeyError as error:  # its table of kinds
        raise ConfigError(f"{SAFE} has no place for numbers of {error}", remedy="export to .pt") from error
    except SafetensorError as error:
        raise _no_room(file, error) from error
