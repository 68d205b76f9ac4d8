"""Which kind of loader does a data set need, and which option belongs to whom?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurm_resilience.elastic.batch import plan_batch
from slurm_resilience.errors import ConfigError
from slurm_resilience.training.data import one_size, refuse_rank
from slurm_resilience.training.loader import Loader
from slurm_resilience.training.stream import Stream

if TYPE_CHECKING:
    from slurm_resilience.training.run import Run

OF_BATCHES = ("shuffle", "drop_last", "seed", "deal", "reduce", "dp_rank", "dp_ranks", "name")


def make(run: Run, dataset: Any, global_batch: int | None, micro_batch: int | None, options: dict[str, Any]) -> Loader | Stream:
    """See :meth:`Run.loader`.  Raises :class:`ConfigError` for a data set that can neither be indexed nor dealt in shards."""
    found = options.pop("fingerprint", None) or getattr(dataset, "fingerprint", "")
    fingerprint = found if isinstance(found, str) else ""
    ours = {name: options.pop(name) for name in OF_BATCHES if name in options}
    if callable(getattr(dataset, "read_shard", None)) and isinstance(getattr(dataset, "num_shards", None), int):
        return _stream(run, dataset, global_batch, micro_batch, fingerprint, ours, options)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"A {type(dataset).__name__} cannot be continued on another number of ranks",
            evidence="it has neither __getitem__ and __len__, nor num_shards and read_shard(shard, skip)",
            remedy="give it one of the two: an iterator alone does not say which samples are left",
        )
    batches = run.batches(len(dataset), global_batch, micro_batch, dataset=fingerprint, **ours)
    return Loader(batches, dataset, seed=batches.order.seed, **options)


def _stream(
    run: Run,
    dataset: Any,
    global_batch: int | None,
    micro_batch: int | None,
    fingerprint: str,
    ours: dict[str, Any],
    options: dict[str, Any],
) -> Stream:
    for name in ("drop_last", "deal", "loader_class"):
        if name in ours or name in options:
            raise ConfigError(f"run.loader({name}=…) means nothing for a stream of shards", remedy="leave it out")
    ranks, rank = ours.pop("dp_ranks", None), ours.pop("dp_rank", None)
    ranks = run.dp_ranks if ranks is None else ranks
    whole = one_size("global_batch", global_batch, run.global_batch)
    part = one_size("micro_batch", micro_batch, run.micro_batch)
    if whole is None:
        raise ConfigError(
            "Nobody says how many samples a step takes",
            remedy="run.loader(dataset, global_batch=…), or submit the run with global_batch",
        )
    refuse_rank(run.dp_rank if rank is None else rank, ranks)
    name = ours.pop("name", "train")
    seed = ours.pop("seed", None)
    made = Stream(
        dataset,
        plan_batch(whole, part or -(-whole // ranks), ranks),
        rank=run.dp_rank if rank is None else rank,
        seed=run.seed if seed is None else seed,
        exchange=run._world.exchange,
        fingerprint=fingerprint,
        follows_world=run.keep_accumulation is not None,
        **ours,
        **options,
    )
    run._take_in(name, made)
    return made
