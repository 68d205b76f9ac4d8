"""Everything that a resumed run must get back: which objects those are, how their state is taken and put back.

Tensors go to DCP under names that depend on no world size; all the rest is JSON in the manifest.  The order of putting back is
written down once, in :meth:`Registry.restore`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from slurm_resilience.checkpoint.errors import MismatchedCheckpoint
from slurm_resilience.errors import CheckpointError, ConfigError, nearest
from slurm_resilience.training import fqn, optimizer, plain
from slurm_resilience.training.layout import Layout

RESERVED = frozenset({"rng", "probe"})
KINDS = ("models", "optimizers", "schedulers", "others")


@dataclass
class Snapshot:
    """State in the form of a checkpoint: named tensors, and the JSON beside them."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


class Registry:
    """The registered objects, told apart by what they are."""

    def __init__(self) -> None:
        self.models: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.schedulers: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        self._pristine: dict[str, dict[str, Any]] = {}
        self._loads = 0

    def __bool__(self) -> bool:
        return bool(self.models or self.optimizers or self.schedulers or self.others)

    def add(self, objects: dict[str, Any]) -> None:
        """Take objects in; None is passed over.  Raises :class:`ConfigError` with the reason for what cannot be kept."""
        for label, thing in objects.items():
            if thing is not None:
                self._home(label, thing)[label] = thing
        for label, scheduler in self.schedulers.items():
            theirs = getattr(scheduler, "optimizer", None)
            if theirs is not None and all(theirs is not one for one in self.optimizers.values()):
                raise ConfigError(
                    f"The scheduler {label!r} drives an optimizer that is not registered",
                    evidence=f"its {type(theirs).__name__} is not among {', '.join(sorted(self.optimizers)) or 'none at all'}",
                    remedy="register the optimizer that the scheduler was built with, not a copy or a wrapper of it",
                )

    def _home(self, label: str, thing: Any) -> dict[str, Any]:
        if label in RESERVED:
            raise ConfigError(f"The name {label!r} is used by the checkpoint itself", remedy="register it under another name")
        for known, other in self.all().items():
            if known == label or other is thing:
                raise ConfigError(
                    f"{label!r} is registered twice",
                    evidence=f"the same object is known as {known!r}" if other is thing else "the name is taken",
                    remedy="register each object once, under a name of its own",
                )
        if isinstance(thing, torch.nn.Module):
            return self.models
        if isinstance(thing, torch.optim.Optimizer):
            return self.optimizers
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise ConfigError(
                f"{label!r} cannot be kept in a checkpoint",
                evidence=f"a {type(thing).__name__} has no state_dict() and load_state_dict()",
                remedy="give its class these two methods, or leave it out",
            )
        if type(thing).__module__.startswith("torchdata."):
            raise ConfigError(
                f"{label!r} keeps the position of one rank, which means nothing to another number of ranks",
                evidence=f"it is a {type(thing).__module__}.{type(thing).__qualname__}",
                remedy="use run.loader(dataset, …, loader_class=StatefulDataLoader) and register no loader",
            )
        return self.schedulers if callable(getattr(thing, "get_last_lr", None)) else self.others

    def all(self) -> dict[str, Any]:
        """Every object by its name."""
        return {**self.models, **self.optimizers, **self.schedulers, **self.others}

    def require_schedulers(self, when: str) -> None:
        """Raise :class:`ConfigError` when a scheduler drives a registered optimizer behind our back."""
        drivers = [thing for thing in (*self.schedulers.values(), *self.others.values()) if hasattr(thing, "optimizer")]
        driven = {id(thing.optimizer) for thing in drivers}
        if any(not hasattr(thing, "optimizer") for thing in self.schedulers.values()):
            return  # it does not say which optimizer it drives
        for label, one in self.optimizers.items():
            if id(one) not in driven and any("initial_lr" in group for group in one.param_groups):
                raise ConfigError(
                    f"A learning-rate scheduler was built on the optimizer {label!r} but is not registered ({when})",
                    evidence="the optimizer's groups have the 'initial_lr' that only a scheduler's constructor writes; built "
                    "after loading, it also overwrites the learning rate that was restored",
                    remedy="build the scheduler before run.register(…), pass it as scheduler=…, then call run.resume()",
                )

    # -- taking -----------------------------------------------------------------------------------------------

    def capture(self) -> Snapshot:
        """The state of everything as it is now.  Changes nothing and draws no random number.

        The tensors are the live ones: they must be written, or copied, before training goes on.
        """
        out = Snapshot()
        names = self.names()
        models: dict[str, Any] = {}
        for label, model in self.models.items():
            models[label] = {}
            for key, (_, value) in fqn.model_entries(label, model).items():
                if isinstance(value, torch.Tensor):
                    out.tensors[key] = value.detach()
                else:
                    models[label][key] = plain.encode(value, f"{key}/extra", out.tensors)
        out.plain["models"] = models
        out.plain["optimizers"] = {
            label: optimizer.capture(label, one, names, out.tensors) for label, one in self.optimizers.items()
        }
        for kind in ("schedulers", "others"):
            objects: dict[str, Any] = getattr(self, kind)
            out.plain[kind] = {label: plain.encode(one.state_dict(), label, out.tensors) for label, one in objects.items()}
        return out

    def names(self) -> dict[int, str]:
        """``id(parameter)`` → name, with FSDP2's parameters in their sharded form."""
        for model in self.models.values():
            fqn.settle(model)
        return fqn.parameter_names(self.models)

    # -- putting back -----------------------------------------------------------------------------------------

    def template(self, saved: dict[str, Any], layout: Layout) -> dict[str, torch.Tensor]:
        """Tensors to load into, placed and sharded as the objects want them now; the models' are the models' own.

        Raises :class:`MismatchedCheckpoint` when the checkpoint is about another model or other objects.
        """
        self._remember()
        self._match_labels(saved)
        names = self.names()
        room: dict[str, torch.Tensor] = {}
        for label, model in self.models.items():
            room.update(self._model_room(label, model, saved["models"][label], layout))
        for label, one in self.optimizers.items():
            if self._loads:
                one.state.clear()
            room.update(optimizer.template(label, one, names, saved["optimizers"][label], layout))
        for label in (*self.schedulers, *self.others):
            wanted = plain.tensor_keys(saved["schedulers" if label in self.schedulers else "others"][label])
            if wanted:
                room.update(_other_room(label, self.all()[label], wanted, layout))
        return room

    def restore(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Put everything back; what was there before, also from an earlier try, leaves nothing behind.

        Models first.  Then the optimizer, which brings the learning rate that was in use.  Then the scheduler: it was built
        before, so that its constructor wrote 'initial_lr' and a first learning rate before the restored ones and not over
        them; and it comes after the optimizer, because some kinds write to their optimizer while they load.  Then the
        scaler and everything else.
        """
        names = self.names()
        for label, model in self.models.items():
            own = {}
            for key, (name, _) in fqn.model_entries(label, model).items():
                extra = saved["models"][label]
                own[name] = tensors[key] if key in tensors else plain.decode(extra[key], tensors)
            model.load_state_dict(own)
        for label, one in self.optimizers.items():
            optimizer.restore(label, one, names, saved["optimizers"][label], tensors)
        self._reset_schedulers()
        for label, thing in self.schedulers.items():
            thing.load_state_dict(plain.decode(saved["schedulers"][label], tensors))
        for label, thing in self.others.items():
            thing.load_state_dict(plain.decode(saved["others"][label], tensors))
        self._loads += 1

    def held(self, given: dict[str, torch.Tensor], names: dict[int, str]) -> dict[str, torch.Tensor]:
        """What the objects hold now, by its names in a checkpoint; of those that only took state, what they were ``given``.

        Models and optimizers are asked themselves.  Others are not: a ``state_dict()`` of the user's own may have effects.
        """
        asked = tuple(f"{one}.state." for one in self.optimizers)
        out = {key: value for key, value in given.items() if not key.startswith(asked)}
        for label, model in self.models.items():
            entries = fqn.model_entries(label, model).items()
            out.update({key: value.detach() for key, (_, value) in entries if isinstance(value, torch.Tensor)})
        for label, one in self.optimizers.items():
            optimizer.held(label, one, names, out)
        return out

    def writes_to(self, key: str) -> bool:
        """Whether what was loaded under a name may have been written to when its object took it.

        A model copies what it is given, into itself.  torch's own optimizers take the tensors as they are.
        """
        for label, one in self.optimizers.items():
            if key.startswith(f"{label}.state."):
                return not optimizer.takes_as_given(one)
        return any(key.startswith(f"{label}.") for label in self.models)

    def trained(self) -> tuple[set[str], tuple[str, ...]]:
        """The names of all parameters, the second ones of tied parameters too, and how the optimizers' tensors' names begin."""
        parameters = {
            f"{label}.{fqn.clean_name(model, name)}"
            for label, model in self.models.items()
            for name, _ in model.named_parameters(remove_duplicate=False)
        }
        return parameters, tuple(f"{label}.state." for label in self.optimizers)

    def buffers(self) -> set[str]:
        """The names of what models keep besides parameters."""
        return {key for label, model in self.models.items() for key in fqn.model_entries(label, model)} - self.trained()[0]

    def _match_labels(self, saved: dict[str, Any]) -> None:
        for kind in KINDS:
            mine, theirs = set(getattr(self, kind)), set(saved[kind])
            if mine != theirs:
                odd = min(mine ^ theirs)
                raise MismatchedCheckpoint(
                    f"The checkpoint keeps other {'objects' if kind == 'others' else kind} than this script has registered",
                    evidence=f"here: {', '.join(sorted(mine)) or 'none'}; there: {', '.join(sorted(theirs)) or 'none'}"
                    + (f" ({odd!r}: {nearest(odd, mine | theirs - {odd})})" if kind != "others" and mine and theirs else ""),
                    remedy="register the same objects under the same names as before, or start a new run folder",
                )

    def _model_room(self, label: str, model: torch.nn.Module, extra: dict[str, Any], layout: Layout) -> dict[str, torch.Tensor]:
        entries = fqn.model_entries(label, model)
        room = {key: value for key, (_, value) in entries.items() if isinstance(value, torch.Tensor)}
        there = {key for key in layout.under(f"{label}.") if not any(key.startswith(f"{one}/extra") for one in extra)}
        missing, unknown = sorted(room.keys() - there), sorted(there - room.keys())
        differ = [
            f"{key}: {tuple(room[key].shape)} {room[key].dtype} here, {layout.shape(key)} {layout.dtype(key)} there"
            for key in sorted(room.keys() & there)
            if tuple(room[key].shape) != layout.shape(key) or room[key].dtype != layout.dtype(key)
        ]
        odd = {key for key, (_, value) in entries.items() if not isinstance(value, torch.Tensor)} ^ extra.keys()
        if missing or unknown or differ or odd:
            parts = [
                f"{len(found)} {what}, such as {found[0]}"
                for found, what in (
                    (missing, "tensors of the model are not in the checkpoint"),
                    (unknown, "tensors in the checkpoint are not in the model"),
                    (differ, "tensors differ in shape or type"),
                    (sorted(odd), "extra states are on one side only"),
                )
                if found
            ]
            raise MismatchedCheckpoint(
                f"The checkpoint holds another model than {label!r}",
                evidence="; ".join(parts),
                remedy="resume with the model that the run was started with, or give this model a run folder of its own; "
                "the checkpoint is whole and stays usable",
            )
        return {**room, **{key: _like(layout, key) for name in extra for key in layout.under(f"{name}/extra")}}

    def _remember(self) -> None:
        """Keep the schedulers as they were built: one that adds to itself while loading must not do so twice."""
        if self._pristine:
            return
        for label, thing in self.schedulers.items():
            memo = {id(one): one for one in self.optimizers.values()}
            self._pristine[label] = {
                name: copy.deepcopy(value, memo) for name, value in vars(thing).items() if _state_like(value)
            }

    def _reset_schedulers(self) -> None:
        if not self._loads:
            return
        for label, thing in self.schedulers.items():
            vars(thing).update(copy.deepcopy(self._pristine[label]))


def _state_like(value: Any) -> bool:
    """What a scheduler counts with; its optimizer, its functions and the schedulers inside it are left alone."""
    if isinstance(value, (list, tuple)):
        return all(_state_like(one) for one in value)
    if isinstance(value, dict):
        return all(_state_like(one) for one in value.values())
    return value is None or isinstance(value, (bool, int, float, str))


def _like(layout: Layout, key: str) -> torch.Tensor:
    return torch.zeros(layout.shape(key), dtype=layout.dtype(key))


def _other_room(label: str, thing: Any, wanted: list[str], layout: Layout) -> dict[str, torch.Tensor]:
    present: dict[str, torch.Tensor] = {}
    plain.encode(thing.state_dict(), label, present)
    room = {}
    for key in wanted:
        if key not in layout:
            raise CheckpointError(f"The checkpoint refers to the tensor {key} and does not hold it")
        now = present.get(key)
        fits = now is not None and tuple(now.shape) == layout.shape(key) and now.dtype == layout.dtype(key)
        room[key] = torch.zeros_like(now) if now is not None and fits else _like(layout, key)
    return room
