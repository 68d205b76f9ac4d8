"""Models, and their state, as ranks of tests build them: FSDP2, DDP and two-dimensional, with uneven sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 12)
        self.b = nn.Linear(12, 5)
        self.register_buffer("scale", torch.arange(3.0))
        self.register_buffer("brief", torch.arange(6, dtype=torch.bfloat16))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def build(kind: str, world: int, *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model.a, mesh=mesh)
        fully_shard(model.b, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "2d":
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, both["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
        fully_shard(model, mesh=both["dp"])
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, seed: int = 5) -> float:
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(torch.randn(12, 7, generator=generator)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    return {"model": model_state, "optimizer": optimizer_state}


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=FLAT
    )  # fmt: skip


def whole(value: Any, prefix: str = "") -> dict[str, Any]:
    """All leaves by path, tensors gathered to their full size.  Collective."""
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for key, inner in value.items():
            out.update(whole(inner, f"{prefix}.{key}" if prefix else str(key)))
        return out
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return {prefix: value.detach().clone() if isinstance(value, torch.Tensor) else value}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The keys that are not bit for bit the same."""
    out = sorted(one.keys() ^ other.keys())
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        same = torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        if not same:
            out.append(key)
    return out


def together(value: Any) -> list[Any]:
    """Everybody's ``value``."""
    if not dist.is_initialized():
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out
