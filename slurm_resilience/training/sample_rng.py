"""Random augmentations that depend on the sample and nothing else: not on its rank, its worker, or what was drawn before it.

A loader's worker has random generators of its own, whose state nobody can save; after a relaunch the same sample
would be cropped in another way.  Seeded by (seed, epoch, sample) it comes out the same on any world, with any workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info

from slurm_resilience.training import rng

NO_PLACE = -1  # where rng.derive() of a rank has its world


@contextmanager
def seeded(seed: int, epoch: int, sample: int, place: int = NO_PLACE) -> Iterator[None]:
    """Whatever Python, NumPy and torch draw inside follows from these numbers; the training's own generators stay untouched."""
    own = get_worker_info() is None
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state()) if own else None
    try:
        key = rng.derive(seed, epoch, sample, place)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        torch.default_generator.manual_seed(key)  # torch.manual_seed() would seed the accelerators as well
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])
