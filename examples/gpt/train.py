"""Train a byte-level GPT on the source of Python's standard library, through whatever happens to the machines.

    python examples/gpt/train.py --steps 100                                     one process
    slurm-resilience run --local 4 -- python examples/gpt/train.py --steps 100   four pretend nodes
    submit_resilient(train, steps=100, nodes=(3, 4), …)                          on Slurm

The global batch of a step is the same for every number of ranks, so is the loss curve (within 1e-5).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from data import Text, standard_library
from model import GPT, GPTConfig, loss_of

from slurm_resilience import Run

GLOBAL_BATCH = 48
MICRO_BATCH = 4


def build(run: Run, config: GPTConfig, seed: int) -> nn.Module:
    """The same initial weights on every rank, sharded over the ranks when there are several (FSDP2)."""
    torch.manual_seed(seed)
    model = GPT(config)
    if torch.cuda.is_available():
        model.cuda()
    if run.world_size > 1:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def warmup_cosine(step: int, *, warmup: int, total: int) -> float:
    """The learning rate at a step, as a fraction of its peak."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


@torch.no_grad()
def validate(run: Run, model: nn.Module, text: Text, samples: int = 32, size: int = 8) -> float:
    """Mean loss over the same few validation samples; every rank computes all of them, as FSDP2 wants."""
    device = next(model.parameters()).device
    model.eval()
    losses = []
    with run.section("eval"):
        for at in range(0, samples, size):
            if run.should_stop():
                break
            tokens, targets = text.validation(range(at, at + size))
            losses.append(loss_of(model, tokens.to(device), targets.to(device)).item())
    model.train()
    return sum(losses) / len(losses) if losses else math.nan


def train(
    run: Run,
    steps: int = 200,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    peak_lr: float = 3e-3,
    validate_every: int = 50,
    sleep_s: float = 0.0,
    seed: int = 1,
    config: GPTConfig = GPTConfig(),  # noqa: B008 - a frozen value
    quiet: bool = False,
) -> str:
    """Train for ``steps`` optimizer steps over the life of the run; returns how it ended."""
    run.init_process_group()
    text = standard_library(config.context)
    model = build(run, config, seed)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, warmup=min(20, steps // 5 + 1), total=steps)
    )

    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    batches = run.batches(
        text.num_train,
        global_batch or run.global_batch or GLOBAL_BATCH,
        micro_batch or run.micro_batch or MICRO_BATCH,
        dataset=text.fingerprint,
    )
    run.probe(lambda tokens, targets: loss_of(model, tokens, targets), *(part.to(device) for part in text.validation(range(4))))
    start = run.resume()
    say = print if run.rank == 0 and not quiet else lambda *_, **__: None
    say(
        f"{'resumed at step' if start else 'started at step'} {start} with {run.world_size} ranks, attempt {run.attempt}",
        flush=True,
    )

    for step in run.steps(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for micro in batches(step):
            tokens, targets = text.train(micro.indices)
            with run.accumulate(micro):
                loss = loss_of(model, tokens.to(device), targets.to(device))
                run.scale_loss(loss, micro).backward()
            total += loss.detach() * micro.weight
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        lr = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        loss = run.sum(total)
        run.report(loss=loss, grad_norm=grad_norm, lr=lr, samples=(step + 1) * batches.global_batch)
        if validate_every and (step + 1) % validate_every == 0:
            validation_loss = validate(run, model, text)
            if not math.isnan(validation_loss):
                run.report(validation_loss=validation_loss)
                say(f"step {step + 1:5d}  validation loss {validation_loss:.4f}", flush=True)
        if (step + 1) % 10 == 0:
            say(f"step {step + 1:5d}  loss {loss:.6f}  lr {lr:.2e}  {time.perf_counter() - began:.3f} s", flush=True)
        if sleep_s:
            time.sleep(sleep_s)

    say(f"{run.outcome} at step {run.step}", flush=True)
    return run.outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps over the life of the run (default: 200)")
    parser.add_argument("--global-batch", type=int, help=f"samples per step (default: the run's, or {GLOBAL_BATCH})")
    parser.add_argument("--micro-batch", type=int, help=f"samples per forward pass (default: the run's, or {MICRO_BATCH})")
    parser.add_argument("--checkpoint-every", type=int, help="steps between checkpoints (default: the run's)")
    parser.add_argument("--validate-every", type=int, default=50, help="steps between validations, 0 for none (default: 50)")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout probability (default: 0)")
    parser.add_argument("--sleep", type=float, default=0.0, metavar="S", help="make each step longer by S seconds")
    parser.add_argument("--seed", type=int, default=1, help="seed of the initial weights (default: 1)")
    parser.add_argument("--folder", help="the run's folder (default: the supervisor's, or ./resilience-run)")
    options = parser.parse_args()
    run = Run(folder=options.folder, checkpoint={"every_steps": options.checkpoint_every} if options.checkpoint_every else None)
    train(
        run,
        steps=options.steps,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        validate_every=options.validate_every,
        sleep_s=options.sleep,
        seed=options.seed,
        config=GPTConfig(dropout=options.dropout),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
