"""Loading on three ranks what four have saved, every used byte verified, beside plain dcp.load of what three have saved.

Plain torch.distributed.checkpoint has the easier task: each of its ranks reads back exactly the chunks that it wrote.  For
comparison it also loads our checkpoint of four ranks, whose format it knows.  All loads are from the page cache, in turns, so
that they compare the work and not the disk; the slowest rank's time counts.
"""

from __future__ import annotations

import logging
import math
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

MOST = 1.1


def parse() -> Any:
    parser = record.parser(__doc__)
    parser.add_argument("--mib", type=int, default=768, help="size of the whole state (default: 768)")
    parser.add_argument("--tensors", type=int, default=48, help="number of sharded tensors (default: 48)")
    parser.add_argument("--saved-by", type=int, default=4, help="ranks that save (default: 4)")
    parser.add_argument("--loaded-by", type=int, default=3, help="ranks that load (default: 3)")
    parser.add_argument("--repeat", type=int, default=9, help="turns that count (default: 9; one more warms up)")
    parser.add_argument("--dir", default="/var/tmp", help="a directory on a disk (default: /var/tmp)")
    return parser.parse_args()


def state_of(args: Any, world: int, *, filled: bool) -> dict[str, Any]:
    """The same global tensors on any world, sharded over its ranks by rows."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    rows = args.mib * (1 << 20) // 4 // args.tensors // 1024
    state: dict[str, Any] = {}
    for number in range(args.tensors):
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(rows, 1024, generator=generator) if filled else torch.zeros(rows, 1024)
        state[f"layer{number}"] = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    return state


def begin(rank: int, world: int, base: str, name: str) -> Any:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{base}/{name}", rank=rank, world_size=world)
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=120))


def save_main(rank: int, args: Any, base: str) -> None:
    import torch.distributed as dist

    from slurm_resilience.checkpoint.dcp import save
    from slurm_resilience.checkpoint.store import CheckpointStore

    group = begin(rank, args.saved_by, base, "savers")
    store = CheckpointStore.open(Path(base) / "ours", attempt=1)
    if rank == 0:
        store.fence()
    save(store, {"state": state_of(args, args.saved_by, filled=True)}, step=1, process_group=group)
    dist.barrier()
    dist.destroy_process_group()


class Loads:
    """One of the ranks that load."""

    def __init__(self, rank: int, args: Any, base: str) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        from slurm_resilience.checkpoint.store import CheckpointStore

        self.group = begin(rank, args.loaded_by, base, "loaders")
        self.rank, self.args = rank, args
        self.expected = {"state": state_of(args, args.loaded_by, filled=True)}
        self.target = {"state": {name: torch.zeros_like(value) for name, value in self.expected["state"].items()}}
        self.store = CheckpointStore.open(Path(base) / "ours", attempt=2)
        (self.entry,) = self.store.entries()
        self.plain = Path(base) / "plain"
        dcp.save(self.expected, checkpoint_id=self.plain, process_group=self.group)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.extra: dict[str, int] = defaultdict(int)
        self.bytes_read = 0

    def ours(self) -> None:
        from slurm_resilience.checkpoint.dcp import load

        self.bytes_read = load(self.store, self.entry, self.target, process_group=self.group).bytes_read

    def theirs(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.target, checkpoint_id=self.plain, process_group=self.group)

    def theirs_resharding(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.target, checkpoint_id=self.store.path(self.entry), process_group=self.group)

    def turn(self, number: int) -> None:
        works: list[tuple[str, Callable[[], None]]] = [
            ("reshard_load", self.ours), ("dcp_load", self.theirs), ("dcp_reshard_load", self.theirs_resharding),
        ]  # fmt: skip
        for name, work in works[number % 3 :] + works[: number % 3]:
            self.timed(name, work)

    def timed(self, name: str, work: Callable[[], None]) -> None:
        import torch
        import torch.distributed as dist

        for value in self.target["state"].values():
            value.to_local().fill_(math.nan)
        dist.barrier()
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what there is now
        clock = record.Clock()
        work()
        took = torch.tensor([clock.read()], dtype=torch.float64)
        self.extra[name] = max(self.extra[name], memory("VmHWM") - before)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        self.times[name].append(float(took))
        for key, value in self.target["state"].items():
            if not value.to_local().equal(self.expected["state"][key].to_local()):
                raise AssertionError(f"{name} did not give back {key}")


def load_main(rank: int, args: Any, base: str) -> None:
    import torch
    import torch.distributed as dist

    loads = Loads(rank, args, base)
    for number in range(args.repeat + 1):
        if number == 1:
            loads.times.clear()
        loads.turn(number)
    read = torch.tensor([loads.bytes_read])
    dist.all_reduce(read)
    names = sorted(loads.extra)
    extra = torch.tensor([loads.extra[name] for name in names])
    dist.all_reduce(extra, op=dist.ReduceOp.MAX)
    if rank == 0:
        report(loads, args, int(read), dict(zip(names, extra.tolist(), strict=True)))
    dist.destroy_process_group()


def memory(word: str) -> int:
    """Bytes that the kernel counts for this process: VmRSS now, VmHWM at the highest since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{word}:"))


def report(loads: Loads, args: Any, bytes_read: int, extra: dict[str, int]) -> None:
    from slurm_resilience.checkpoint.dcp.read import BLOCK_BYTES

    times = dict(sorted(loads.times.items()))
    figures: dict[str, Any] = {f"{name}_s": record.median(values) for name, values in times.items()}
    figures["bytes"] = loads.entry.bytes
    record.emit(
        args,
        "reshard",
        figures,
        packages=("torch", "xxhash"),
        filesystem=str(filesystem.of(args.dir)),
        repetitions=args.repeat,
        ranks={"saved_by": args.saved_by, "loaded_by": args.loaded_by},
        bytes_read=bytes_read,
        spread={name: record.spread(values) for name, values in times.items()},
        ratios={
            "reshard_load_over_dcp_load": figures["reshard_load_s"] / figures["dcp_load_s"],
            "dcp_reshard_load_over_dcp_load": figures["dcp_reshard_load_s"] / figures["dcp_load_s"],
            "at_most": MOST,
        },
        # Beyond the tensors that are filled, which are there before; the highest of all ranks and turns.
        memory={
            "shard_bytes": sum(value.to_local().nbytes for value in loads.target["state"].values()),
            "extra_bytes": extra,
            "block_bytes": BLOCK_BYTES,
        },
    )


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = parse()
    import torch.multiprocessing

    base = tempfile.mkdtemp(prefix="bench-reshard-", dir=args.dir)
    try:
        torch.multiprocessing.spawn(save_main, (args, base), nprocs=args.saved_by)
        torch.multiprocessing.spawn(load_main, (args, base), nprocs=args.loaded_by)
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
