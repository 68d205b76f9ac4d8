"""A small training program that comes to grief in the way that it is told, once: ``mishaps.py KIND STEPS``.

All ranks meet in an all-reduce of gradients in every step.  Rank 1 (or all, where the kind says so) does the mischief in step
AT of the first attempt; later attempts train on undisturbed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time

import torch
import torch.distributed as dist

from slurm_resilience import Run

AT = 13
EVERY = 5  # steps between checkpoints: the next attempt goes on from step 10
GUILTY = 1


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows whose loading kills the worker process when it is told to."""

    def __init__(self, poisoned: bool) -> None:
        self.poisoned = poisoned

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.poisoned and index == 2:
            os._exit(7)
        return torch.ones(4) * index


def exception() -> None:
    raise RuntimeError("the loss of rank 1 is a teapot")


def os_exit() -> None:
    os._exit(3)


def segfault() -> None:
    ctypes.string_at(0)


def memory_error() -> None:
    """More than may be had: refused by the limit of the address space."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    bytearray(64 << 30)


def endless_loop() -> None:
    while True:
        AT.bit_length()


def sleeps_for_ever() -> None:
    time.sleep(100_000)


def other_collective() -> None:
    """The others reduce gradients; this one waits for them where they will not come."""
    dist.barrier(group=EXTRA)


def loader_death() -> None:
    for _ in torch.utils.data.DataLoader(Rows(True), num_workers=1):
        pass


def leaves_early() -> None:
    sys.exit(0)


EXTRA: dist.ProcessGroup | None = None


def main() -> None:
    global EXTRA
    kind, steps = sys.argv[1], int(sys.argv[2])
    run = Run()
    run.init_process_group("gloo")
    EXTRA = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.register(model=model, optimizer=optimizer)
    run.resume()
    print(f"rank {run.rank} starts at step {run.step}", flush=True)
    for step in run.steps(steps):
        time.sleep(float(os.environ.get("MISHAP_STEP_S", "0.05")))
        if step == AT and run.attempt == 1 and run.rank == GUILTY and kind in globals():
            globals()[kind]()
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), float(step % 3))).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        run.report(loss=loss)


if __name__ == "__main__":
    main()
