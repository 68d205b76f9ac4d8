"""The small training with a Run: resumed and verified, with a probe.  ``--fsdp``: FSDP2 and DCP, else bare torch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import small


def main() -> None:
    marks = small.Marks()
    import torch

    from slurm_resilience import Run

    if "--fsdp" in sys.argv:
        import torch.distributed.checkpoint
        from torch.distributed.fsdp import fully_shard
    marks.put("imported")
    run = Run(global_batch=small.GLOBAL_BATCH, micro_batch=small.MICRO_BATCH)
    run.init_process_group()
    marks.put("joined")
    model, data, target = small.build()
    if "--fsdp" in sys.argv:
        for layer in model[::2]:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.register(model=model, optimizer=optimizer)
    run.probe(lambda inputs, wanted: torch.nn.functional.mse_loss(model(inputs), wanted), data[:16], target[:16])
    batches = run.batches(len(data))
    marks.put("built")
    run.resume()
    marks.put("loaded")
    for step in run.steps(small.STEPS):
        total = 0.0
        for micro in batches(step):
            with run.accumulate(micro):
                some = list(micro.indices)
                loss = torch.nn.functional.mse_loss(model(data[some]), target[some])
                run.scale_loss(loss, micro).backward()
            total += loss.detach() * micro.weight
        if "--fsdp" not in sys.argv:
            small.average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=run.sum(total))
        marks.pace(step)


if __name__ == "__main__":
    main()
