"""Saving and loading 1 GiB on two ranks: verified, durable and indexed, beside plain torch.distributed.checkpoint.

All variants run in one process group, in turns.  "Durable" means the same for all: every file and directory fsynced.  Loads
are from the page cache, so that they compare the work and not the disk.  A stall is how long the call keeps training.
"load_and_digest" proves the state digest of what was loaded as a resume on the same mesh does it, "load_and_sums" as one on
another mesh does.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import record

from slurm_resilience.checkpoint import filesystem


def parse() -> Any:
    parser = record.parser(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the whole state (default: 1024)")
    parser.add_argument("--tensors", type=int, default=64, help="number of sharded tensors (default: 64)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7, help="turns that count (default: 7; one more warms up)")
    parser.add_argument("--dir", default="/var/tmp", help="a directory on a disk (default: /var/tmp)")
    return parser.parse_args()


class Bench:
    """One rank of the measurement."""

    def __init__(self, rank: int, args: Any, root: Path) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        from slurm_resilience.checkpoint.store import CheckpointStore

        self.rank, self.args, self.root = rank, args, root
        dist.init_process_group("gloo", init_method=f"file://{root}/world", rank=rank, world_size=args.ranks)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
        self.async_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
        mesh = init_device_mesh("cpu", (args.ranks,))
        rows = args.mib * (1 << 20) // 4 // args.tensors // 1024
        self.state: dict[str, Any] = {"model": {}, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.999]}}
        self.target: dict[str, Any] = {"model": {}, "optimizer": {"lr": 0.0, "betas": [0.0, 0.0]}}
        for number in range(args.tensors):
            part, name = "model" if number % 3 == 0 else "optimizer", f"layer{number}"
            self.state[part][name] = distribute_tensor(torch.randn(rows, 1024), mesh, [Shard(0)])
            self.target[part][name] = torch.zeros_like(self.state[part][name])
        self.store = CheckpointStore.open(root / "ours", attempt=1)
        if rank == 0:
            self.store.fence()
        self.times: dict[str, list[float]] = defaultdict(list)
        self.bytes = 0
        self.rows: list[Any] = []
        dist.barrier()

    def timed(self, name: str, work: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Do it on all ranks together, with nothing left to write back from before; the slowest rank's time counts."""
        import torch
        import torch.distributed as dist

        if self.rank == 0:
            os.sync()
        dist.barrier()
        clock = record.Clock()
        value = work(*given, **named)
        took = torch.tensor([clock.read()], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        self.times[name].append(float(took))
        return value

    def forget(self, *paths: Path) -> None:
        import torch.distributed as dist

        dist.barrier()
        if self.rank == 0:
            for path in paths:
                shutil.rmtree(path, ignore_errors=True)
        dist.barrier()

    def save_plain(self, path: Path) -> None:
        """``dcp.save``, and what it leaves undone: .metadata and the directories.  The shards it fsyncs itself."""
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state, checkpoint_id=path, process_group=self.group)
        if self.rank == 0:
            for each in [*sorted(path.iterdir()), path, path.parent]:
                fd = os.open(each, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
        dist.barrier(self.group)

    def save_ours(self, step: int) -> Any:
        from slurm_resilience.checkpoint.dcp import save

        return save(self.store, self.state, step=step, process_group=self.group)

    def load_both(self, entry: Any, plain: Path, *, ours_first: bool) -> None:
        import torch.distributed.checkpoint as dcp

        from slurm_resilience.checkpoint.dcp import load
        from slurm_resilience.training import state_digest
        from slurm_resilience.training.as_loaded import AsLoaded

        kept = state_digest.kept(state_digest.join([state_digest.part_of(self.by_name(self.state), printed=True)]))

        def ours() -> None:
            load(self.store, entry, self.target, process_group=self.group)

        def proved(digest: dict[str, Any] | None) -> None:
            """As ``run.resume()`` does it."""
            room = self.by_name(self.target)
            watch = state_digest.watch(digest, room)
            load(self.store, entry, self.target, process_group=self.group, watch=watch)
            self.rows = AsLoaded(room, lambda key: False, watch.sums).rows

        def theirs() -> None:
            dcp.load(self.target, checkpoint_id=plain, process_group=self.group)

        order = [
            ("load", ours),
            ("load_and_digest", functools.partial(proved, kept)),
            ("load_and_sums", functools.partial(proved, None)),
            ("dcp_load", theirs),
        ]
        for name, work in order if ours_first else order[::-1]:
            for value in self.tensors(self.target):
                value.zero_()
            self.timed(name, work)
            if not all(a.equal(b) for a, b in zip(self.tensors(self.state), self.tensors(self.target), strict=True)):
                raise AssertionError(f"{name} did not give back what was saved")
            if "_and_" in name and state_digest.by_key(self.rows) != kept["tensors"]:
                raise AssertionError(f"{name}: the digest of what was loaded is not that of what was saved")

    def by_name(self, state: dict[str, Any]) -> dict[str, Any]:
        """The tensors by their names in the checkpoint."""
        named = {f"{part}.{name}": value for part, inner in state.items() for name, value in inner.items()}
        return {name: value for name, value in named.items() if hasattr(value, "to_local")}

    def distributed(self, state: dict[str, Any]) -> list[Any]:
        return [value for inner in state.values() for value in inner.values() if hasattr(value, "to_local")]

    def tensors(self, state: dict[str, Any]) -> list[Any]:
        return [value.to_local() for value in self.distributed(state)]

    def save_and_load(self, turn: int) -> None:
        plain = self.root / f"plain{turn}"
        if turn % 2:
            self.timed("dcp_save", self.save_plain, plain)
            entry = self.timed("save", self.save_ours, turn)
        else:
            entry = self.timed("save", self.save_ours, turn)
            self.timed("dcp_save", self.save_plain, plain)
        self.load_both(entry, plain, ours_first=bool(turn % 2))
        self.bytes = entry.bytes
        self.forget(self.store.path(entry), plain)

    def stalls(self, saver: Any, turn: int) -> None:
        """One of each, in an order that turns, so that none always finds the disk as another has left it."""
        suffix = "" if turn else "_first"
        ways = [self.stall_ours, self.sync_ours, self.stall_plain]
        for way in ways[turn % 3 :] + ways[: turn % 3]:
            way(saver, turn, suffix)

    def stall_ours(self, saver: Any, turn: int, suffix: str) -> None:
        self.timed(f"stall{suffix}", saver.start, self.state, step=1000 + turn)
        if not saver.staged_bytes:
            raise AssertionError("there is not memory enough for a copy, so nothing was saved in the background")
        self.forget(self.store.path(saver.wait()))

    def sync_ours(self, saver: Any, turn: int, suffix: str) -> None:
        self.forget(self.store.path(self.timed(f"sync{suffix}", self.save_ours, 2000 + turn)))

    def stall_plain(self, saver: Any, turn: int, suffix: str) -> None:
        import torch.distributed.checkpoint as dcp

        plain = self.root / f"async{turn}"
        future = self.timed(
            f"dcp_stall{suffix}", dcp.async_save, self.state, checkpoint_id=plain, process_group=self.async_group
        )
        future.result()
        self.forget(plain)

    def torch_save(self) -> None:
        """``torch.save`` of the same number of bytes by one rank, fsynced."""
        import torch
        import torch.distributed as dist

        whole = [value for value in self.tensors(self.state) for _ in range(self.args.ranks)] if self.rank == 0 else []
        copies = [value.clone() for value in whole]

        def write() -> None:
            if self.rank == 0:
                with open(self.root / "single.pt", "wb") as file:
                    torch.save(copies, file)
                    file.flush()
                    os.fsync(file.fileno())
            dist.barrier()

        for _ in range(3):
            self.timed("torch_save", write)


def rank_main(rank: int, args: Any, base: str) -> None:
    import torch
    import torch.distributed as dist

    from slurm_resilience.checkpoint.dcp import BackgroundSaver

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    bench = Bench(rank, args, Path(base))
    for turn in range(args.repeat + 1):
        if turn == 1:
            bench.times.clear()
        bench.save_and_load(turn)
    saver = BackgroundSaver(bench.store, timeout_s=120, ranks_here=args.ranks)
    for turn in range(args.repeat + 1):
        bench.stalls(saver, turn)
    staged = saver.staged_bytes
    saver.close()
    bench.torch_save()
    if rank == 0:
        report(bench, staged)
    dist.destroy_process_group()


def report(bench: Bench, staged: int) -> None:
    times = dict(sorted(bench.times.items()))
    figures: dict[str, Any] = {f"{name}_s": record.median(values) for name, values in times.items()}
    figures["bytes"] = bench.bytes
    record.emit(
        bench.args,
        "save_load",
        figures,
        packages=("torch", "xxhash"),
        filesystem=str(filesystem.of(bench.root)),
        repetitions=bench.args.repeat,
        ranks=bench.args.ranks,
        staged_bytes_per_rank=staged,
        spread={name: record.spread(values) for name, values in times.items()},
        ratios={
            "save_over_dcp_save": figures["save_s"] / figures["dcp_save_s"],
            "load_over_dcp_load": figures["load_s"] / figures["dcp_load_s"],
            "load_and_digest_over_dcp_load": figures["load_and_digest_s"] / figures["dcp_load_s"],
            "load_and_sums_over_dcp_load": figures["load_and_sums_s"] / figures["dcp_load_s"],
            "stall_over_sync": figures["stall_s"] / figures["sync_s"],
            "dcp_stall_over_dcp_save": figures["dcp_stall_s"] / figures["dcp_save_s"],
        },
    )


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = parse()
    import torch.multiprocessing

    base = tempfile.mkdtemp(prefix="bench-save-load-", dir=args.dir)
    try:
        torch.multiprocessing.spawn(rank_main, (args, base), nprocs=args.ranks)
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
