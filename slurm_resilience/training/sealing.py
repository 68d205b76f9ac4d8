"""The digest of the state that is about to be saved, taken from the live tensors: what is copied and written later must match.

Ranks that hold copies of the same tensor are compared on the way.  Copies of a parameter or a moment that differ are a fact
worth telling: something has changed one of them silently.  Buffers differ by design (batch statistics are each rank's own,
until the first rank's are broadcast).  Either way the checkpoint must hold one known copy, or its digest would be about
another one: what most ranks hold, of buffers what the lowest rank holds.

What is each rank's own by its nature is no copy, and one rank's would be given to all: a tensor that has another shape on
another rank, or what an optimizer keeps in a plain tensor for its rank's part of a sharded parameter.  That is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from slurm_resilience.checkpoint.dcp.team import Team
from slurm_resilience.errors import ConfigError
from slurm_resilience.training import state_digest
from slurm_resilience.training.state import Snapshot
from slurm_resilience.training.state_digest import Copies, Joined, Row

log = logging.getLogger(__name__)


def seal(team: Team, snapshot: Snapshot, buffers: Collection[str]) -> list[Copies]:
    """Add the digest to ``snapshot``, and make copies that differ the same in it; returns those that should not have differed.

    Collective.  The live tensors stay as they are.  Raises :class:`ConfigError`, on all ranks, for what is each rank's own.
    """

    boxes: dict[str, list[list[Any]]] = {}  # one for each rank's part: only the rank that writes the manifest needs them

    def join(parts: list[list[Row]]) -> tuple[Joined, list[Copies]]:
        differing = [_by_first(one) if one.box.key in buffers else one for one in state_digest.join(parts).differing]
        whole = state_digest.join(parts, prefer=differing)
        boxes.update(whole.boxes)
        return replace(whole, boxes={}), differing

    joined, differing = team.funnel("digesting the state", lambda: state_digest.part_of(snapshot.tensors, printed=True), join)
    _refuse_ranks_own(snapshot, joined, differing)
    snapshot.plain["digest"] = state_digest.kept(replace(joined, boxes=boxes))
    if differing:
        _share(team, snapshot, differing)
    odd = [one for one in differing if one.box.key not in buffers]
    if odd and team.leads:
        log.error(
            "copies of the same state differ: %s; the checkpoint keeps what most ranks hold", "; ".join(map(str, odd[:5]))
        )
    return odd


def _refuse_ranks_own(snapshot: Snapshot, joined: Joined, differing: Sequence[Copies]) -> None:
    own = {
        one.box.key: f"is another one{str(one).removeprefix(one.box.key)}"
        for one in differing
        if _of_a_shard(one.box.key, snapshot.tensors)
    }
    own |= {key: f"is {how}" for key, how in joined.uneven.items()}
    if own:
        shown = "; ".join(f"{key} {how}" for key, how in list(own.items())[:3])
        more = f"; and {len(own) - 3} more" if len(own) > 3 else ""
        raise ConfigError(
            "Some of what is registered is each rank's own, and a checkpoint would give one rank's to all",
            evidence=f"plain tensors that should be the same everywhere: {shown}{more}",
            remedy="an optimizer's state for a sharded parameter has to be a DTensor like it (torch.zeros_like gives one), or "
            "the same on all ranks; of other tensors register what all ranks have alike, or a DTensor",
        )


def _of_a_shard(key: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """It is a plain tensor of an optimizer's, beside a parameter of which each rank has a part."""
    parameter = tensors.get(key.partition(".state.")[2].rpartition(".")[0])
    if isinstance(tensors[key], DTensor) or not isinstance(parameter, DTensor):
        return False
    return any(placement.is_shard() for placement in parameter.placements)


def seal_own(snapshot: Snapshot) -> None:
    """Add the digest of what this rank holds, for a copy that no other rank will load.  Talks to nobody."""
    own = state_digest.join([state_digest.part_of(snapshot.tensors, printed=True)])
    snapshot.plain["digest"] = {"v": state_digest.VERSION, "own": own.tensors, "boxes": own.boxes}


def _by_first(one: Copies) -> Copies:
    first = min(min(ranks) for ranks in one.held.values())
    return replace(one, most=next(sums for sums, ranks in one.held.items() if first in ranks))


def _share(team: Team, snapshot: Snapshot, differing: Sequence[Copies]) -> None:
    """Give the ranks that hold something else the copy that is kept: one broadcast for each rank that has such copies."""
    by_keeper: dict[int, list[Copies]] = {}
    for one in differing:
        by_keeper.setdefault(one.keeper, []).append(one)
    for keeper, mine in sorted(by_keeper.items()):
        sizes = [_nbytes(one) for one in mine]
        parcel = torch.zeros(sum(sizes), dtype=torch.uint8)
        if team.rank == keeper:
            parcel = torch.cat([_raw(_local(snapshot.tensors[one.box.key])) for one in mine])
        dist.broadcast(parcel, src=dist.get_global_rank(team.group, keeper), group=team.group)  # type: ignore[arg-type]
        for one, raw in zip(mine, torch.split(parcel, sizes), strict=True):
            if team.rank in one.odd:
                live = snapshot.tensors[one.box.key]
                snapshot.tensors[one.box.key] = _replaced(live, raw)


def _nbytes(one: Copies) -> int:
    dtype: torch.dtype = getattr(torch, one.dtype)
    return torch.Size(one.box.size).numel() * dtype.itemsize


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _raw(local: torch.Tensor) -> torch.Tensor:
    return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _replaced(live: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """A tensor like ``live`` with other bytes."""
    local = _local(live)
    other = raw.clone().view(local.dtype).reshape(local.shape).to(local.device)
    if not isinstance(live, DTensor):
        return other
    return DTensor.from_local(other, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride())
