"""Transformers' Trainer, resilient: a tiny GPT-2 that learns to count.

slurm-resilience run --local 2 -- python examples/frameworks/with_transformers.py
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from slurm_resilience.integrations.transformers import Resilience


class Counting(torch.utils.data.Dataset):
    """Sequences n, n+1, n+2, … modulo 32."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        time.sleep(self.sleep_s / 8)
        tokens = (torch.arange(16) + place) % 32
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds to add to each step, to make it one to interrupt")
    args = parser.parse_args()
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.1))

    resilience = Resilience()
    settings = TrainingArguments(
        output_dir=resilience.scratch(), max_steps=args.steps, per_device_train_batch_size=8, learning_rate=1e-3,
        logging_steps=1, use_cpu=not torch.cuda.is_available(),
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, train_dataset=Counting(args.sleep), callbacks=[resilience])
    trainer.train(resume_from_checkpoint=resilience.attach(trainer))
    print(f"at step {trainer.state.global_step}")


if __name__ == "__main__":
    main()
