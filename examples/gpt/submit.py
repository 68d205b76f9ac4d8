"""Submit the GPT example to Slurm, elastic: it trains on three or four nodes, whichever are there.

python examples/gpt/submit.py --steps 200
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train import train

from slurm_resilience import submit_resilient


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps over the life of the run (default: 200)")
    parser.add_argument("--folder", default="resilience-runs", help="where run folders are made (default: ./resilience-runs)")
    parser.add_argument("--nodes", default="3-4", help="fewest and most nodes (default: 3-4)")
    parser.add_argument("--spares", type=int, default=0, help="nodes kept idle and warm for lost ones (default: 0)")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints (default: 10)")
    parser.add_argument("--sleep", type=float, default=0.0, metavar="S", help="make each step longer by S seconds")
    parser.add_argument("--local", action="store_true", help="on this machine, without Slurm")
    options = parser.parse_args()
    job = submit_resilient(
        train,
        kwargs={"steps": options.steps, "sleep_s": options.sleep, "validate_every": 0},
        nodes=options.nodes,
        spares=options.spares,
        folder=options.folder,
        name="gpt",
        config={"global_batch": 48, "micro_batch": 4, "checkpoint": {"every_steps": options.checkpoint_every}},
        cluster="local" if options.local else "slurm",
        **({} if options.local else {"timeout_min": 30}),
    )
    print(f"job {job.job_id} in {job.run_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
