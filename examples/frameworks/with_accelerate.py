"""Accelerate, resilient: a loop of one's own, state through the accelerator.

slurm-resilience run --local 2 -- python examples/frameworks/with_accelerate.py
"""

from __future__ import annotations

import argparse
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from slurm_resilience.integrations.accelerate import AccelerateRun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds to add to each step, to make it one to interrupt")
    args = parser.parse_args()
    run = AccelerateRun()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    x = torch.randn(2048, 16)
    y = x.sum(dim=1, keepdim=True).sin()
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    run.prepared(accelerator)
    for step in run.steps(args.steps):
        # The samples follow from the step: nothing has to be skipped after a restart.
        mine = torch.arange(step * 32 + accelerator.process_index * 16, step * 32 + accelerator.process_index * 16 + 16) % len(
            x
        )
        loss = torch.nn.functional.mse_loss(model(x[mine]), y[mine])
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(args.sleep)
        run.report(loss=accelerator.gather(loss.detach().reshape(1)).mean())
    print(f"at step {run.step}")


if __name__ == "__main__":
    main()
