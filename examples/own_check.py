"""A check of one's own after loading: if the rows of a codebook are not of length one, the checkpoint is not used.

``python examples/own_check.py 20`` trains 20 steps; with 40 after that it goes on from step 20, if the check holds.
"""

import sys
from collections.abc import Iterator

import torch

from slurm_resilience import Run
from slurm_resilience.training.verify import Check, Restored, close

run = Run()
codebook = torch.nn.Linear(8, 4, bias=False)
optimizer = torch.optim.SGD(codebook.parameters(), lr=0.1)
data = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))


# --8<-- [start:check]
def rows_have_length_one(restored: Restored) -> Iterator[Check]:
    """All ranks call it alike, when everything is put back; what it yields is named in the reason of a quarantine."""
    lengths = codebook.weight.detach().norm(dim=1)
    yield close("length of the longest row", 1.0, float(lengths.max()), tolerance=1e-4)
    yield close("length of the shortest row", 1.0, float(lengths.min()), tolerance=1e-4)


run.register(model=codebook, optimizer=optimizer)
run.verify_with(rows_have_length_one)
run.resume()
# --8<-- [end:check]
for _ in run.steps(int(sys.argv[1])):
    distances = 1 - (data @ codebook.weight.T).amax(dim=1)
    loss = distances.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        codebook.weight /= codebook.weight.norm(dim=1, keepdim=True)
    run.report(loss=loss)

own = [str(check.verdict) for check in run.resumed.checks if "row" in check.name] if run.resumed else []
print(f"{run.outcome} at step {run.step}; own checks: {', '.join(own) or 'none, it started fresh'}")
