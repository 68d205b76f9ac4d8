"""The loss of a step that is not taken: once after loading, against the log, and now and then by two ranks, against each other.

Both leave training as it was: random generators, buffers and gradients are put back, and nothing is drawn from a loader.

A processor that computes wrong says nothing.  Every so many steps each rank computes one micro-batch of its own and one of a
peer on another node, from the same random numbers, and compares loss and gradients bit by bit with what the peer got.  Where
parameters are sharded a rank has no gradients of its own, so only the loss is compared.  With three ranks or more the one that
differs from both its neighbours is named; of two, the one that contradicts itself, or else both.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from slurm_resilience.errors import ConfigError
from slurm_resilience.training import gradients, rng
from slurm_resilience.training.data import Batches, Micro
from slurm_resilience.training.probe import to_float, untouched
from slurm_resilience.training.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Account:
    """What one rank computed: its own micro-batch, its own once more, its peer's."""

    node: str
    mine: str
    again: str
    peers: str


@dataclass(frozen=True)
class Suspicion:
    """Ranks, and their nodes, of which one or more computed something else than the others."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    why: str


class Recompute:
    """``fn(micro)`` gives the loss of one micro-batch, as the training loop computes it, and is called by all ranks alike."""

    def __init__(self, fn: Callable[[Micro], Any], batches: Any, world: World, *, seed: int, node: str = "") -> None:
        if not isinstance(batches, Batches):
            raise ConfigError(
                "run.recompute_with() needs the batches of run.batches()",
                evidence=f"it was given a {type(batches).__name__}: asking it for data ahead of time would move its readers",
                remedy="read the samples of micro.indices in the function, or leave run.recompute_with() out",
            )
        self._fn = fn
        self._batches = batches
        self._world = world
        self._seed = seed
        self._node = node or socket.gethostname()

    def mean_loss(self, step: int, models: Iterable[torch.nn.Module]) -> float:
        """The loss of a whole step over all ranks, as the weights are now.  All ranks must come."""
        with untouched(models), torch.no_grad():
            mine = sum(to_float(self._fn(micro)) * micro.weight for micro in self._batches.of_rank(step, self._batches.rank))
        return float(sum(self._world.exchange(mine)))

    def compare(self, step: int, models: Sequence[torch.nn.Module]) -> Suspicion | None:
        """Let every rank check a peer's work on one micro-batch of a step.  All ranks must come, between two steps."""
        ranks = self._batches.plan.dp_ranks
        if ranks != self._world.size or ranks < 2:
            return None
        here = self._batches.rank
        nodes = self._world.exchange(self._node)
        shift = _shift(nodes)
        mine = self._digest(step, here, models)
        peers = self._digest(step, (here + shift) % ranks, models)
        digests = self._world.exchange((mine, peers))
        again = mine
        if any(digests[rank][1] != digests[(rank + shift) % ranks][0] for rank in range(ranks)):
            again = self._digest(step, here, models)
        repeated = self._world.exchange(again)
        accounts = [
            Account(node, own, twice, other) for node, (own, other), twice in zip(nodes, digests, repeated, strict=True)
        ]
        return judge(accounts, shift)

    def _digest(self, step: int, rank: int, models: Sequence[torch.nn.Module]) -> str:
        """Of loss and gradients of a rank's first micro-batch, computed here from that rank's random numbers."""
        micro = next(iter(self._batches.of_rank(step, rank)))
        parameters = [parameter for model in models for parameter in model.parameters()]
        sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        before = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
            with untouched(models), gradients.synchronised(models, False), torch.set_grad_enabled(not sharded):
                rng.reseed(rng.derive(self._seed, step, rank, self._batches.plan.dp_ranks))
                loss = self._fn(micro)
                if not sharded:
                    loss.backward()
            said = [loss.detach(), *(parameter.grad for parameter in parameters if parameter.grad is not None)]
            return _bits(said)
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            with gradients.synchronised(models, True):
                pass


def judge(accounts: Sequence[Account], shift: int) -> Suspicion | None:
    """Who computed something else?  Rank ``r`` has checked rank ``r + shift``; None when all agree."""
    count = len(accounts)
    quarrels = [(rank, (rank + shift) % count) for rank in range(count)]
    quarrels = [(one, other) for one, other in quarrels if accounts[one].peers != accounts[other].mine]
    if not quarrels:
        return None
    fickle = [rank for rank, account in enumerate(accounts) if account.mine != account.again]
    often = [sum(rank in pair for pair in quarrels) for rank in range(count)]
    if fickle:
        ranks, why = fickle, "computed the same micro-batch twice and got two results"
    elif count > 2 and max(often) > 1:
        ranks = [rank for rank in range(count) if often[rank] == max(often)]
        why = "differs bit by bit from the peer that checked it and from the peer that it checked"
    else:
        ranks = sorted({rank for pair in quarrels for rank in pair})
        why = "one of these differs bit by bit from the other, and nobody can tell which"
    return Suspicion(tuple(ranks), tuple(dict.fromkeys(accounts[rank].node for rank in ranks)), why)


def _shift(nodes: Sequence[str]) -> int:
    """How far away everybody's peer is: on another node for all, where that can be."""
    count = len(nodes)
    for shift in range(1, count):
        if all(nodes[rank] != nodes[(rank + shift) % count] for rank in range(count)) and (2 * shift != count or count == 2):
            return shift
    return 1


def _bits(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for one in tensors:
        digest.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
