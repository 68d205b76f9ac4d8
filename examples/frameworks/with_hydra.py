"""Hydra, resilient: a sweep in which every run is supervised, requeued and resumed by itself.

python examples/frameworks/with_hydra.py -m hydra/launcher=resilient hydra.launcher.nodes=1-2 lr=1e-3,1e-2

What is not an argument of map_resilient() goes into its configuration: +hydra.launcher.config.checkpoint.every_min=5
"""

from __future__ import annotations

import hydra
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

import slurm_resilience.submit.hydra  # noqa: F401 (makes hydra/launcher=resilient known)
from slurm_resilience import Run

ConfigStore.instance().store(name="config", node={"lr": 1e-3, "steps": 50, "fail_at": -1})


@hydra.main(version_base=None, config_name="config")
def main(config: DictConfig) -> float:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    x = torch.randn(256, 16)
    y = x.sum(dim=1, keepdim=True).sin()
    loss = torch.zeros(())
    with Run.current() as run:
        run.register(model=model, optimizer=optimizer)
        batches = run.batches(len(x), global_batch=32, micro_batch=32)
        run.resume()
        for step in run.steps(config.steps):
            if step == config.fail_at and run.attempt == 1:
                raise RuntimeError("this attempt was told to fail")
            for micro in batches(step):
                rows = torch.tensor(micro.indices)
                loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
                run.scale_loss(loss, micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.report(loss=loss.detach())
        # of all the data, so that it is the same however often the run was taken up again
        return float(torch.nn.functional.mse_loss(model(x), y).detach())


if __name__ == "__main__":
    main()
