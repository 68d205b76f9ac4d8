"""The same small training for all: model, data, and the marks that tell a recovery's phases apart.

A mark is a line ``pid rank word wall-clock``; each system is judged by the marks of its ranks alone, never by its own word.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

WIDTH, LAYERS, SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 256, 4, 4096, 48, 8
STEPS, PACE_S, SAVE_EVERY = 1_000_000, 0.1, 10


class Marks:
    """One rank's marks, appended to FOLDER/marks.  FOLDER is what follows ``--folder`` on the command line."""

    def __init__(self) -> None:
        self.folder = Path(sys.argv[sys.argv.index("--folder") + 1])
        self._rank = os.environ["RANK"]
        self._file = open(self.folder / "marks", "a", buffering=1)
        self.put("started")

    def put(self, word: str) -> None:
        self._file.write(f"{os.getpid()} {self._rank} {word} {time.time():.4f}\n")

    def pace(self, step: int) -> None:
        """After each step: say that it was taken, and take the time that a step of 0.1 s takes.

        The last rank never returns once FOLDER/hang is there.  It takes the file away, so that the next attempt goes on.
        """
        self.put(f"step-{step}")
        time.sleep(PACE_S)
        hang = self.folder / "hang"
        if int(self._rank) == int(os.environ["WORLD_SIZE"]) - 1 and hang.exists():
            hang.unlink()
            self.put("hung")
            while True:
                time.sleep(3600)


def build() -> tuple[Any, Any, Any]:
    """Model, data and targets, the same on every rank.  Shapes: data (SAMPLES, WIDTH), targets (SAMPLES, 1)."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers: list[Any] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return model, data, data[:, :8].sum(dim=1, keepdim=True).sin()


def average_gradients(model: Any) -> None:
    """What a script that shards nothing does between backward and step."""
    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
