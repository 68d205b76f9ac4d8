"""What verification adds to a resume of the GPT example, beside the load and one forward pass of a batch.

Each turn is a resume in a process that has trained, so imports and first calls are not in it.  ``load_s`` is from the choice
of the entry until everything is put back, with all that the state digest of what was loaded takes (``digest_s`` of it),
``verify_s`` all checks after that (the probe's forward pass included).  The model is the one of examples/gpt as it stands:
29 tensors, 0.5 MB, three times that with its moments.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import record


def parse() -> Any:
    parser = record.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=15, help="turns that count (default: 15; two more warm up)")
    parser.add_argument("--steps", type=int, default=4, help="steps before the checkpoint (default: 4)")
    return parser.parse_args()


def turn(folder: Path, steps: int) -> tuple[float, float, float, float]:
    """Resume once and take no step; seconds of load, verification, a forward pass and, of the load, the digest."""
    import torch
    from data import standard_library
    from model import GPT, GPTConfig, loss_of

    from slurm_resilience import Run
    from slurm_resilience.training import prints, state_digest

    digest_s = 0.0

    def timed(call: Any) -> Any:
        def measured(*given: Any, **named: Any) -> Any:
            nonlocal digest_s
            clock = record.Clock()
            value = call(*given, **named)
            digest_s += clock.read()
            return value

        return measured

    with Run(folder=folder, checkpoint={"every_min": None}) as run:
        torch.manual_seed(1)
        model = GPT(GPTConfig())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        run.register(model=model, optimizer=optimizer, scheduler=scheduler)
        text = standard_library(GPTConfig().context)
        tokens, targets = text.validation(range(8))
        run.probe(lambda tokens, targets: loss_of(model, tokens, targets), tokens, targets)
        with contextlib.ExitStack() as patched:
            for where, name in ((state_digest, "part_of"), (state_digest, "watch"), (prints.Prints, "__call__")):
                call = getattr(where, name)
                setattr(where, name, timed(call))
                patched.callback(setattr, where, name, call)
            run.resume()
        for _ in run.steps(steps):
            optimizer.zero_grad()
            loss_of(model, tokens, targets).backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        clock = record.Clock()
        with torch.no_grad():
            loss_of(model, tokens, targets)
        forward_s = clock.read()
        if run.resumed is None:
            return 0.0, 0.0, forward_s, 0.0
        return run.resumed.seconds - run.resumed.verify_s, run.resumed.verify_s, forward_s, digest_s


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = parse()
    logging.disable(logging.WARNING)
    sys.path.insert(0, str(record.ROOT / "examples" / "gpt"))
    folder = Path(tempfile.mkdtemp(prefix="bench-verify-"))
    try:
        turn(folder, args.steps)
        times = [turn(folder, args.steps) for _ in range(args.repeat + 2)][2:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    load, verify, forward, digest = ([one[place] for one in times] for place in range(4))
    figures: dict[str, float | None] = {
        "verify_s": record.median(verify),
        "load_s": record.median(load),
        "forward_s": record.median(forward),
        "digest_s": record.median(digest),
    }
    beyond = [(v - f) / s for s, v, f, _ in times]
    with_digest = [(v + d - f) / (s - d) for s, v, f, d in times]
    record.emit(
        args,
        "verify",
        figures,
        packages=("torch",),
        repetitions=args.repeat,
        spread={"verify_s": record.spread(verify), "load_s": record.spread(load), "forward_s": record.spread(forward)},
        ratios={
            "verify_beyond_forward_over_load": record.median(beyond),
            "verify_and_digest_beyond_forward_over_load_without": record.median(with_digest),
        },
    )


if __name__ == "__main__":
    main()
