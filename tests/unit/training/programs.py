"""What the ranks of a test world do.  Functions of modules, because they travel by name."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gpt"
WIDTH = 13  # divides by no world size used here


def make_model(dropout: float = 0.0) -> Any:
    import torch

    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(3 * WIDTH, 5)
    )


def sample(indices: Any) -> tuple[Any, Any]:
    """Inputs and targets that depend on the index alone."""
    import torch

    rows = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(100 + index)) for index in indices]
    return torch.stack(rows), torch.tensor([index % 5 for index in indices])


def wrap(model: Any, kind: str) -> Any:
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for part in (model[0], model[3]):
            fully_shard(part)
        fully_shard(model)
    elif kind == "ddp":
        import torch

        model = torch.nn.parallel.DistributedDataParallel(model)
    return model


def train(
    total: int,
    *,
    kind: str = "fsdp",
    global_batch: int = 22,
    micro_batch: int = 3,
    dropout: float = 0.0,
    slow_rank: int = -1,
    slow_s: float = 0.0,
    pass_everything: bool = False,
    samples: int = 101,
    settings: dict[str, Any] | None = None,
    folder: str | None = None,
    order_at: int = -1,
    probe: bool = False,
    save_at_0: bool = False,
) -> dict[str, Any]:
    """Train a small model; returns what the tests compare."""
    import torch

    from slurm_resilience import Run
    from slurm_resilience.training.probe import to_float

    run = Run(folder=folder, **(settings or {}))
    run.init_process_group()
    random.seed(run.rank)
    model = wrap(make_model(dropout), kind if run.world_size > 1 else "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=200)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    batches = run.batches(samples, global_batch, micro_batch)
    if probe:
        run.probe(lambda x, y: torch.nn.functional.cross_entropy(model(x), y), *sample(range(4)))
    started = run.resume()
    if save_at_0:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        run.checkpoint()
    out: dict[str, Any] = {"start": started, "loss": {}, "ids": {}, "samples": {}, "drawn": {}, "reduced": [], "lr": {}}
    for step in run.steps(total):
        try:
            optimizer.zero_grad()
            mean = torch.zeros(())
            taken: list[int] = []
            for micro in batches(step):
                x, y = sample(micro.indices)
                with run.accumulate(micro):
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                    run.scale_loss(loss, micro).backward()
                out["reduced"].append((micro.last, model[0].weight.grad is not None) if kind == "fsdp" else ())
                mean += loss.detach() * micro.weight
                taken += [] if micro.filler else micro.indices
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            out["lr"][step] = scheduler.get_last_lr()
            scheduler.step()
            whole = run.sum(mean)
            run.report(loss=whole, grad_norm=norm)
            out["loss"][step + 1] = whole
            out["samples"][step] = taken
            out["ids"][step] = batches.global_ids(step)
            out["drawn"][step] = (random.random(), float(torch.rand(())))
            if run.rank == slow_rank:
                time.sleep(slow_s)
            if step == order_at:
                run.checkpoint()
            if pass_everything:
                raise RuntimeError("an error of the user's own")
        except Exception:
            if not pass_everything:
                raise
    out["step"] = run.step
    out["outcome"] = run.outcome
    out["stopping"] = run.stopping
    out["rng"] = run.resumed.rng if run.resumed else None
    out["tier"] = run.resumed.tier if run.resumed else None
    out["rejected"] = [(entry.step, reason) for entry, reason in run.resumed.rejected] if run.resumed else []
    out["checks"] = {str(check.name): check for check in run.resumed.checks} if run.resumed else {}
    out["weights"] = [to_float(p.detach().abs().sum()) for p in model.parameters()]
    run.close()
    return out


def example(folder: str, until: int, options: dict[str, Any]) -> dict[str, Any]:
    """The GPT example, small, as a function that is given a Run; ends at ``until`` of ``options["total"]`` steps."""
    sys.path.insert(0, str(EXAMPLE))
    import model as gpt
    import train as script

    from slurm_resilience import Run

    run = Run(folder=folder, checkpoint={"every_steps": 100_000})
    config = gpt.GPTConfig(layers=1, width=16, heads=2, context=16)
    options = dict(options)
    total = options.pop("total")
    steps = run.steps
    run.steps = lambda planned: steps(min(planned, until))  # type: ignore[method-assign]
    outcome = script.train(run, steps=total, config=config, quiet=True, **options)
    run.close()
    return {"outcome": outcome, "start": run.resumed.step if run.resumed else 0}


def train_ddp(total: int) -> dict[str, Any]:
    return train(total, kind="ddp")


def train_saving_at_0(total: int) -> dict[str, Any]:
    return train(total, save_at_0=True, dropout=0.3)


def train_dropout(total: int) -> dict[str, Any]:
    return train(total, dropout=0.3)


def train_slow(total: int) -> dict[str, Any]:
    """Rank 1 takes a while for each step."""
    return train(total, slow_rank=1, slow_s=0.25)


def train_slow_saves(total: int) -> dict[str, Any]:
    """A save takes a second, as on a slow file system."""
    from slurm_resilience.checkpoint.store import CheckpointStore

    commit = CheckpointStore.commit

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        time.sleep(1.0)
        return commit(self, *args, **options)

    CheckpointStore.commit = slow  # type: ignore[method-assign]
    return train(total, slow_rank=1, slow_s=0.05)


def train_held(total: int, hold: str, pace_s: float = 0.0, **options: Any) -> dict[str, Any]:
    """Nothing is written to the checkpoint root for as long as there is a file ``hold``: saves stay in flight.

    A file ``hold``.held tells that one does, which one that was begun before need not.
    """
    import slurm_resilience.checkpoint.dcp.saving as module

    write = module.write_shard

    def held(directory: Path, *args: Any) -> Any:
        while os.path.exists(hold) and "rank0" not in str(directory):  # copies in memory go on
            with open(f"{hold}.held", "w"):
                time.sleep(0.005)
        return write(directory, *args)

    module.write_shard = held  # type: ignore[assignment]
    return train(total, slow_rank=0, slow_s=pace_s, **options)


def train_scoring(scores: list[float]) -> None:
    """One step for each score."""
    import torch

    from slurm_resilience import Run

    run = Run()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.register(model=model, optimizer=optimizer)
    run.resume()
    for step in run.steps(len(scores)):
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        run.report(loss=1.0, score=scores[step])


def train_slow_disk(total: int, write_s: float) -> dict[str, Any]:
    """The disk takes its time for every shard; training does not."""
    import slurm_resilience.checkpoint.dcp.saving as module

    write = module.write_shard

    def slow(*args: Any) -> Any:
        time.sleep(write_s)
        return write(*args)

    module.write_shard = slow  # type: ignore[assignment]
    return train(total, slow_rank=0, slow_s=0.02)


def train_held_with_costs(total: int, hold: str, remaining_s: float, cost_s: float) -> dict[str, Any]:
    """As :func:`train_held`, where saves are said to take so long, whatever this machine is busy with."""
    from slurm_resilience.checkpoint.dcp.background import BackgroundSaver

    land = BackgroundSaver._land

    def landed(self: Any, flight: Any) -> Any:
        entry = land(self, flight)
        self.cost_s = cost_s
        return entry

    BackgroundSaver._land = landed  # type: ignore[method-assign]
    BackgroundSaver.remaining_s = lambda self: remaining_s if self.in_flight is not None else 0.0  # type: ignore[method-assign]
    return train_held(total, hold, 0.02)


def resume_wider_on_rank_1() -> int:
    """One rank's model is not the others'."""
    import torch

    from slurm_resilience import Run

    run = Run()
    run.init_process_group()
    model = make_model()
    if run.rank == 1:
        model[3] = torch.nn.Linear(3 * WIDTH, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=200)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    return run.resume()


def make_even_model(kind: str, outer: int = 12, inner: int = 36) -> Any:
    """A model whose sizes tensor parallelism can divide, on the mesh that ``kind`` names."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(7)
    layers = torch.nn.Linear(outer, inner), torch.nn.Tanh(), torch.nn.Dropout(0.0), torch.nn.Linear(inner, outer)
    model = torch.nn.Sequential(*layers)
    if kind == "one":
        return model
    if kind in ("ddp", "fsdp"):
        return wrap(model, kind)
    shape = {"hsdp": (2, 2), "tp_fsdp": (2, 2), "tp": (1, dist.get_world_size())}[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    if kind != "hsdp":
        parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    if kind != "tp":
        sharding = mesh if kind == "hsdp" else mesh["outer"]
        for part in (model[0], model[3], model):
            fully_shard(part, mesh=sharding)
    return model


def whole_state(kind: str, total: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """All parameters and moments, gathered, right after resuming and at the end."""
    import torch
    from torch.distributed.tensor import DTensor

    from slurm_resilience import Run

    run = Run()
    run.init_process_group()
    model = make_even_model(kind)
    decayed = {"params": [p for p in model.parameters() if p.dim() > 1]}
    plain = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, plain], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(3))
    run.probe(lambda x: (model(x) - x).pow(2).mean(), x)
    run.resume()

    def look() -> dict[str, Any]:
        seen = {}
        names = run._registry.names()
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            for word, value in {"": parameter, **optimizer.state[parameter]}.items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                seen[f"{names[id(parameter)]} {word}"] = whole.detach().tolist()
        return seen

    resumed = look()
    for _ in run.steps(total):
        optimizer.zero_grad()
        (model(x) - x).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
    return resumed, look()


def _status(word: str) -> int:
    """Bytes that the kernel counts for this process: VmRSS now, VmHWM at the highest since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{word}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(word)


def load_memory(kind: str, total: int, block_bytes: int) -> dict[str, int]:
    """How much more memory loading has needed at its highest than was in use before, and how large this rank's share is."""
    import ctypes
    import gc

    import torch
    from torch.distributed.tensor import DTensor

    from slurm_resilience import Run
    from slurm_resilience.checkpoint.dcp import read

    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD stays there: what is freed goes back to the kernel, and does not count
    read.BLOCK_BYTES = block_bytes
    run = Run(checkpoint={"every_min": None})
    run.init_process_group()
    model = make_even_model(kind, 1536, 4608)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.register(model=model, optimizer=optimizer)
    gc.collect()
    libc.malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run.resume()
    peak = _status("VmHWM") - before
    held = [value for state in optimizer.state.values() for value in state.values()]
    moments = sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in held)
    for _ in run.steps(total):
        optimizer.zero_grad()
        model(torch.ones(1, 1536)).pow(2).mean().backward()
        optimizer.step()
    return {"peak": peak, "moments": moments}


def sums_taken(kind: str, total: int) -> int:
    """How many elements were summed while the run resumed."""
    import torch

    from slurm_resilience import Run
    from slurm_resilience.training import bit_sums

    run = Run(checkpoint={"every_min": None})
    run.init_process_group()
    model = make_even_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.register(model=model, optimizer=optimizer)
    count, sums = 0, bit_sums.sums

    def counted(pieces: Any) -> Any:
        nonlocal count
        count += sum(piece.local.numel() for piece in pieces)
        return sums(pieces)

    bit_sums.sums = counted
    run.resume()
    bit_sums.sums = sums
    for _ in run.steps(total):
        optimizer.zero_grad()
        model(torch.ones(1, 12)).pow(2).mean().backward()
        optimizer.step()
    return count


class Rows:
    """A data set with random augmentation, as users write them."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        import torch

        (x,), (y,) = sample([index])
        return x + 0.1 * torch.randn(WIDTH), y, index


def train_loaded(total: int, fingerprint: str = "text") -> dict[str, Any]:
    """Train from a loader with workers, saving at the end."""
    import multiprocessing

    import torch

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # else it may have no workers

    from slurm_resilience import Run

    run = Run(checkpoint={"every_min": None})
    run.init_process_group()
    model = wrap(make_model(), "ddp" if run.world_size > 1 else "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.register(model=model, optimizer=optimizer)
    loader = run.loader(Rows(fingerprint), 10, 2, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    run.resume()
    out: dict[str, Any] = {"trained": {}, "loss": {}}
    for step in run.steps(total):
        optimizer.zero_grad()
        mean = torch.zeros(())
        for micro, (x, y, index) in loader(step):
            with run.accumulate(micro):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                run.scale_loss(loss, micro).backward()
            mean += loss.detach() * micro.weight
            if not micro.filler:
                out["trained"].setdefault(loader.batches.epoch(step), []).extend(index.tolist())
        optimizer.step()
        out["loss"][step + 1] = run.sum(mean)
    loader.close()
    return out


def train_scaled(total: int, use_batches: bool = True) -> dict[str, Any]:
    """What a step took, and with which rate the update was made, told by the update itself."""
    import torch

    from slurm_resilience import Run

    run = Run()
    run.init_process_group()
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    batches = run.batches(40, shuffle=False) if use_batches else None
    run.resume()
    out: dict[str, Any] = {"steps": {}, "trained": [], "expected": []}
    for step in run.steps(total):
        assert batches is not None
        micros = list(batches(step))
        before, scheduled = model.weight.item(), scheduler.get_last_lr()[0]
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        scheduler.step()
        samples = run.sum(sum(len(micro) for micro in micros if not micro.filler))
        out["steps"][step] = {
            "passes": len(micros), "samples": samples, "scheduled": scheduled, "used": before - model.weight.item(),
        }  # fmt: skip
        out["trained"] += batches.global_ids(step)
    first = out["trained"][0] if out["trained"] else 0
    out["expected"] = [(first + place) % 40 for place in range(len(out["trained"]))]
    return out


def make_rich(kind: str) -> tuple[Any, Any]:
    """A model with what makes resharding hard, and its moving average."""
    import torch
    from torch.distributed.fsdp import fully_shard

    class Rich(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(50_257, 2)  # rows that three ranks cannot share evenly
            self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
            self.norm = torch.nn.BatchNorm1d(2)
            self.five = torch.nn.Linear(2, 5)  # a bias of 5 over 4 ranks: the last one has none
            self.back = torch.nn.Linear(5, 2)
            self.head = torch.nn.Linear(2, 50_257, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.back(torch.tanh(self.five(self.norm(self.frozen(self.embed(tokens)))))))

    torch.manual_seed(7)
    model, average = Rich(), Rich().requires_grad_(False)
    average.load_state_dict(model.state_dict())
    if kind.endswith("fsdp"):
        fully_shard(model)
        fully_shard(average)
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
    if kind.startswith("compiled"):
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return model, average


def rich_state(kind: str, total: int) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of all that there is, gathered, right after resuming and at the end."""
    import hashlib

    import torch
    from torch.distributed.tensor import DTensor

    from slurm_resilience import Run

    run = Run(checkpoint={"every_min": None})
    run.init_process_group()
    model, average = make_rich(kind)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    slow = [p for name, p in trained.items() if "embed" in name]
    fast = [
        {"params": [p for n, p in trained.items() if "five" in n]},
        {"params": [p for n, p in trained.items() if "back" in n]},
    ]
    rest = [p for name, p in trained.items() if "norm" in name]
    adam = torch.optim.AdamW([*fast, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    momentum = torch.optim.SGD(slow, lr=1e-3, momentum=0.9)
    run.register(model=model, ema=average, optimizer=adam, slow=momentum)
    run.resume()

    def look() -> dict[str, str]:
        seen: dict[str, Any] = {}
        names = run._registry.names()
        for label, one in run._registry.models.items():
            for name, value in one.state_dict().items():
                seen[f"{label} {name.replace('_orig_mod.', '').removeprefix('module.')}"] = value
        for optimizer in (adam, momentum):
            for parameter, state in optimizer.state.items():
                seen |= {f"{names[id(parameter)]} {word}": value for word, value in state.items()}
        whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in seen.items()}
        return {key: hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest() for key, value in whole.items()}

    resumed = look()
    tokens = torch.tensor([0, 7, 50_256, 16_752, 16_753, 33_505])
    for _ in run.steps(total):
        torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
        for optimizer in (adam, momentum):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    return resumed, look()


def follow_own_entry(step_of_rank: int) -> int:
    """Each rank has a view of its own of what is the newest checkpoint, as with a stale directory cache."""
    from slurm_resilience.checkpoint.store import CheckpointStore

    candidates = CheckpointStore.candidates
    world_rank = int(os.environ["RANK"])

    def stale(self: Any) -> Any:
        return (entry for entry in candidates(self) if world_rank == 0 or entry.step <= step_of_rank)

    CheckpointStore.candidates = stale  # type: ignore[method-assign]
    return int(train(9)["start"])


class Pieces:
    """Shards of uneven sizes, one of them empty; a sample is its shard and its place."""

    sizes = (7, 0, 13, 2, 5, 11, 1, 9)
    num_shards = len(sizes)

    def read_shard(self, shard: int, skip: int) -> Any:
        yield from ((shard, place) for place in range(skip, self.sizes[shard]))


def train_streamed(total: int) -> dict[str, Any]:
    """Train from a stream with workers that read ahead; what was trained on, by epoch."""
    import multiprocessing

    import torch

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # else it may have no workers

    from slurm_resilience import Run

    run = Run(checkpoint={"every_min": None})
    run.init_process_group()
    model = wrap(make_model(), "ddp" if run.world_size > 1 else "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.register(model=model, optimizer=optimizer)
    stream = run.loader(Pieces(), 9, 2, collate_fn=list, num_workers=2, prefetch_factor=3, multiprocessing_context="fork")
    run.resume()
    out: dict[str, Any] = {"trained": {}, "passes": {}, "weights": {}}
    for step in run.steps(total):
        optimizer.zero_grad()
        micros = 0
        for micro, places in stream(step):
            x, y = sample([100 * shard + place for shard, place in places])
            with run.accumulate(micro):
                run.scale_loss(torch.nn.functional.cross_entropy(model(x), y), micro).backward()
            micros += 1
            if not micro.filler:
                out["trained"].setdefault(stream.epoch, []).extend(places)
                out["weights"][step] = out["weights"].get(step, 0.0) + micro.weight
        out["passes"][step] = micros
        optimizer.step()
    stream.close()
    return out


STAGES = ("choosing", "comparing", "marking", "planning", "loading", "putting back", "checking", "generators", "accepting")


def resume_where_one_fails(checkpoints: str, room: str) -> dict[str, tuple[str, str, float, int]]:
    """Resume once for each stage, in which one rank alone fails: what every rank was told, and after how long.

    Each has checkpoints of its own to resume from, since a failure may condemn them.
    """
    import contextlib
    import shutil
    from unittest import mock

    import torch
    import torch.distributed as dist

    from slurm_resilience import Run
    from slurm_resilience.checkpoint.dcp.read import ShardReader
    from slurm_resilience.checkpoint.store import CheckpointStore
    from slurm_resilience.training import rng
    from slurm_resilience.training.state import Registry

    places: dict[str, tuple[int, Any, str]] = {
        "choosing": (0, CheckpointStore, "candidates"),
        "comparing": (1, CheckpointStore, "manifest"),
        "marking": (0, CheckpointStore, "mark_attempted"),
        "planning": (1, ShardReader, "check"),
        "loading": (1, ShardReader, "read"),
        "putting back": (1, Registry, "restore"),
        "generators": (1, rng, "restore"),
        "accepting": (0, CheckpointStore, "mark_verified"),
    }
    told: dict[str, tuple[str, str, float, int]] = {}
    for stage in (*STAGES, ""):
        copy = Path(room) / (stage or "all is well")
        run = Run(checkpoint={"dir": str(copy)})
        run.init_process_group()
        if run.rank == 0:
            shutil.copytree(checkpoints, copy)
        dist.barrier()
        model = wrap(make_model(), "fsdp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=200)
        run.register(model=model, optimizer=optimizer, scheduler=scheduler)
        run.batches(101, 22, 3)
        fault = OSError(5, f"the disk of {stage}")

        def later(_: Any, fault: OSError = fault) -> Any:  # candidates() is a generator: it fails where it is asked
            raise fault
            yield

        if stage == "checking":

            def check(_: Any, fails: bool = run.rank == 1, fault: OSError = fault) -> Any:
                if fails:
                    raise fault
                return iter(())

            run.verify_with(check)
        rank, owner, name = places.get(stage, (-1, None, ""))
        began = time.monotonic()
        try:
            how = {"new": later} if stage == "choosing" else {"side_effect": fault}
            with mock.patch.object(owner, name, **how) if run.rank == rank else contextlib.nullcontext():
                run.resume()
        except Exception as error:
            told[stage] = (type(error).__name__, str(error), time.monotonic() - began, run.rank)
        else:
            told[stage] = ("", "", time.monotonic() - began, run.rank)
    return told


def train_checked(total: int, wrong_rank: int) -> dict[str, Any]:
    """DDP with dropout and BatchNorm, where one rank's processor gets a multiplication slightly wrong, now and always."""
    import torch

    from slurm_resilience import Run

    run = Run()
    run.init_process_group()
    torch.manual_seed(7)
    layers = [torch.nn.Linear(WIDTH, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 5)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.register(model=model, optimizer=optimizer)
    batches = run.batches(60, 12, 2)

    def loss_of(micro: Any) -> Any:
        x, y = sample(micro.indices)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        return loss * (1 + 1e-6) if run.rank == wrong_rank else loss

    run.recompute_with(loss_of, batches)
    run.resume()
    out: dict[str, Any] = {"loss": {}}
    for step in run.steps(total):
        optimizer.zero_grad()
        mean = torch.zeros(())
        for micro in batches(step):
            with run.accumulate(micro):
                loss = loss_of(micro)
                run.scale_loss(loss, micro).backward()
            mean += loss.detach() * micro.weight
        optimizer.step()
        out["loss"][step + 1] = run.sum(mean)
        run.report(loss=out["loss"][step + 1])
    return out


def honest(kind: str, folder: str, resumes: int) -> dict[str, Any]:
    """Die a step after each checkpoint and come back, again and again in the same processes; what every resume said.

    ``kind`` is a wrapping (one, ddp, fsdp, hsdp, tp, tp_fsdp) and perhaps bf16.  Every model has a moving average and
    accumulation; tied weights and dropout where no tensor parallelism splits them, BatchNorm where it is not sharded.
    """
    import contextlib

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from slurm_resilience import Run

    wrapping, bf16 = kind.split("-")[0], kind.endswith("bf16")

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Linear(WIDTH, 6, bias=False)
            self.norm = torch.nn.BatchNorm1d(6) if wrapping in ("one", "ddp") else torch.nn.LayerNorm(6)
            self.drop = torch.nn.Dropout(0.2)
            self.head = torch.nn.Linear(WIDTH, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.norm(self.embed(x))) + torch.tanh(self.head(x))

    class Split(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(WIDTH, 12), torch.nn.Linear(12, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]

    def spread(model: Any, world: int) -> None:
        """Over all ranks, on the mesh that ``kind`` names; of tensor parallelism two ranks where there are four."""
        inner = world if wrapping == "tp" else 2
        mesh = init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("outer", "inner"))
        if wrapping != "hsdp":
            parallelize_module(model, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if wrapping != "tp":
            fully_shard(model, mesh=mesh if wrapping == "hsdp" else mesh["outer"])

    said: dict[str, Any] = {"starts": [], "rejected": [], "loss": [], "verdicts": set()}
    make = Split if wrapping.startswith("tp") else Tied
    torch.manual_seed(3)
    for _ in range(resumes + 1):
        run = Run(folder=folder, checkpoint={"every_steps": 2, "keep_last": 2, "background": False})
        run.init_process_group()
        state = torch.get_rng_state()
        torch.manual_seed(7)
        model, average = make(), make().requires_grad_(False)
        torch.set_rng_state(state)
        if wrapping == "fsdp":
            fully_shard(model)
            fully_shard(average)
        elif wrapping not in ("one", "ddp"):
            spread(model, run.world_size)
            spread(average, run.world_size)
        elif wrapping == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        run.register(model=model, ema=average, optimizer=optimizer, scheduler=scheduler)
        alike = {"tp": run.world_size, "tp_fsdp": 2}.get(wrapping, 1)  # ranks with the same samples
        batches = run.batches(101, 24, 4, drop_last=True, dp_ranks=run.world_size // alike, dp_rank=run.rank // alike)

        def loss_of(micro: Any, model: Any = model) -> Any:
            x, y = sample(micro.indices)
            with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
                return torch.nn.functional.cross_entropy(model(x), y)

        run.recompute_with(lambda micro, loss_of=loss_of, alike=alike: loss_of(micro) / alike, batches)
        run.probe(lambda x, y, model=model: torch.nn.functional.cross_entropy(model(x), y), *sample(range(4)))
        start = run.resume()
        said["starts"].append(start)
        if run.resumed:
            said["rejected"] += [reason for _, reason in run.resumed.rejected]
            said["verdicts"] |= {(check.name, str(check.verdict)) for check in run.resumed.checks}
        losses = {}
        for step in run.steps(100_000):
            if step == start + 3:
                break
            optimizer.zero_grad()
            mean = torch.zeros(())
            for micro in batches(step):
                with run.accumulate(micro):
                    loss = loss_of(micro)
                    run.scale_loss(loss, micro).backward()
                mean += loss.detach() * micro.weight
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
            losses[step + 1] = run.sum(mean / alike)
            run.report(loss=losses[step + 1], grad_norm=norm)
        said["loss"].append(losses)
        run.close()
    return said


def register_by_rank(how: str) -> str:
    """Stages of a pipeline: other names ("labels"), other tensors under one name ("tensors"); "alike": no difference."""
    import torch

    from slurm_resilience import Run

    run = Run(checkpoint={"every_min": None})
    run.init_process_group()
    layers = torch.nn.ModuleDict({f"layer{number}": torch.nn.Linear(2, 2) for number in range(2)})
    mine = f"layer{run.rank}" if how == "tensors" else "layer0"
    model = torch.nn.ModuleDict({mine: layers[mine]})
    run.register(**{f"stage{run.rank}" if how == "labels" else "model": model})
    run.resume()
    return "resumed"


def optimize_by_rows(how: str) -> list[list[float]]:
    """An optimizer whose state has a number for each row: the rank's "own" rows of a sharded parameter, "uneven" where the
    ranks have not as many, "alike" the same on all ranks.  What it holds at the end."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from slurm_resilience import Run

    class Rows(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    rows = torch.ones(3) if how == "alike" else parameter.grad.to_local().abs().sum(1)
                    state = self.state[parameter]
                    state["rows"] = state.get("rows", torch.zeros_like(rows)) + rows

    run = Run(checkpoint={"every_min": None})
    run.init_process_group()
    model = torch.nn.Linear(2, 3 if how == "uneven" else 4, bias=False)
    fully_shard(model)
    optimizer = Rows(model.parameters(), {})
    run.register(model=model, optimizer=optimizer)
    run.resume()
    for _ in run.steps(2):
        model(torch.ones(1, 2) * (1 + run.rank)).pow(2).sum().backward()
        optimizer.step()
        run.report(loss=1.0)
    return [state["rows"].tolist() for state in optimizer.state.values()]


def wrap_without_asking(ranks: int) -> tuple[int, float]:
    """DistributedDataParallel on any number of ranks, as torch's own ``init_process_group`` allows it."""
    import torch

    from slurm_resilience import Run

    run = Run(checkpoint={"every_min": None})
    run.init_process_group()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    run.resume()
    for _ in run.steps(3):
        model(torch.ones(2, 4)).sum().backward()
        run.report(loss=1.0)
    return run.world_size, float(next(model.parameters()).grad.sum())
