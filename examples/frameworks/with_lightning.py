"""Lightning, resilient: the trainer keeps its loop, we keep it alive.

slurm-resilience run --local 2 --global-batch 32 --set micro_batch=8 -- python examples/frameworks/with_lightning.py
"""

from __future__ import annotations

import argparse
import time

import lightning as L
import torch

from slurm_resilience.integrations.lightning import Resilience


class Regression(L.LightningModule):
    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.sleep_s = sleep_s
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        time.sleep(self.sleep_s / 2)
        return torch.nn.functional.mse_loss(self.model(x), y)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds to add to each step, to make it one to interrupt")
    args = parser.parse_args()
    L.seed_everything(0)
    x = torch.randn(2048, 16)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True).sin())

    resilience = Resilience()
    loader = torch.utils.data.DataLoader(data, batch_sampler=resilience.batches(len(data)))
    trainer = L.Trainer(
        max_steps=args.steps, logger=False, enable_progress_bar=False, accelerator="auto",
        callbacks=[resilience], **resilience.trainer_arguments(),
    )  # fmt: skip
    trainer.fit(Regression(args.sleep), loader, ckpt_path=resilience.newest(), weights_only=False)
    print(f"at step {trainer.global_step}")


if __name__ == "__main__":
    main()
