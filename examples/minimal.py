"""The twelve lines, in a script that runs: a small regression, resumable, elastic, exact on any number of ranks."""

import torch

from slurm_resilience import Run

data = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
target = data.sum(dim=1, keepdim=True).sin()

# --8<-- [start:readme]
run = Run(global_batch=64, micro_batch=16)
run.init_process_group()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
if run.world_size > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
run.register(model=model, optimizer=optimizer)  # what must survive
batches = run.batches(len(data))  # the same global batch on any number of ranks
run.resume()  # from the newest checkpoint that can be trusted
for step in run.steps(200):  # beats, checkpoints, stops in time when asked to
    total = 0.0
    for micro in batches(step):
        with run.accumulate(micro):
            loss = torch.nn.functional.mse_loss(model(data[list(micro.indices)]), target[list(micro.indices)])
            run.scale_loss(loss, micro).backward()
        total += loss.detach() * micro.weight
    optimizer.step()
    optimizer.zero_grad()
    run.report(loss=run.sum(total))
# --8<-- [end:readme]
print(f"{run.outcome} at step {run.step}")
