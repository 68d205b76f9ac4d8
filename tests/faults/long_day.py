"""A training run in which everything takes long for once, and nothing is wrong: ``long_day.py STEPS SCALE``.

Steps of a tenth of a second; then a checkpoint of 60 s, an evaluation of 90 s by rank 0 alone while the others wait for it, a
compilation of 20 s in the middle of a step without a word of warning.  SCALE makes all of that shorter.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from slurm_resilience import Run

SLOW_SAVE_AT, EVALUATION_AT, COMPILE_AT = 30, 50, 70


class SlowToSave:
    """State that takes its time, once."""

    def __init__(self, run: Run, seconds: float) -> None:
        self.run, self.seconds = run, seconds

    def state_dict(self) -> dict[str, Any]:
        if self.run.step == SLOW_SAVE_AT:
            time.sleep(self.seconds)
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def main() -> None:
    steps, scale = int(sys.argv[1]), float(sys.argv[2])
    run = Run()
    run.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.register(model=model, optimizer=optimizer, slow=SlowToSave(run, 60 * scale))
    run.resume()

    def compiles_slowly(graph: Any, inputs: Any) -> Any:
        time.sleep(20 * scale)
        return graph.forward

    for step in run.steps(steps):
        time.sleep(0.1)
        optimizer.zero_grad()
        if step == COMPILE_AT:
            torch.compile(lambda x: x * 2, backend=compiles_slowly)(torch.ones(2))
        loss = model(torch.ones(2, 4)).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        run.report(loss=loss)
        if step == EVALUATION_AT and run.rank == 0:
            with run.section("eval"):
                time.sleep(90 * scale)
    print("a long day is over", flush=True)


if __name__ == "__main__":
    main()
