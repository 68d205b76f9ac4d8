"""A rank that costs nothing: no torch, no collectives; it steps, saves, stops and ends as a Run would, by the same contract.

For tests of what Slurm does to a job.  RUN_DIR/enough ends it, RUN_DIR/rotten makes it fail; RUN_DIR/cheap.json is its
checkpoint, every 20 steps of 50 ms.
With an argument it fails after a few steps: raise, kill, hang, or a number to exit with; "kill-here" on one node, always.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from slurm_resilience.progress.contract import RankContract
from slurm_resilience.progress.facts import FactSender
from slurm_resilience.progress.page import PageWriter

EVERY = 20


def fail(how: str, run_dir: Path) -> None:
    if how == "raise":
        raise ValueError("the data is rotten")
    if how == "kill-here":
        bad, here = run_dir / "bad-node", os.environ["SLURMD_NODENAME"]
        if not bad.exists():
            bad.write_text(here)
        if bad.read_text() != here:
            return
        how = "kill"
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(3600)
    sys.exit(int(how))


def main() -> None:
    for name in ("SIGTERM", "SIGCONT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    contract = RankContract.from_environment()
    assert contract is not None
    rank, run_dir = int(os.environ["RANK"]), Path(contract.run_dir)
    page, facts = PageWriter(contract.page), FactSender(contract.facts, attempt=contract.attempt, rank=rank)
    saved = run_dir / "cheap.json"
    step = json.loads(saved.read_text())["step"] if saved.exists() else 0

    def save() -> None:
        if rank == 0:
            temporary = saved.with_suffix(f".{contract.attempt}")
            temporary.write_text(json.dumps({"step": step}))
            temporary.rename(saved)
            facts.send("checkpoint_committed", step=step, name=f"step-{step}", bytes=0, seconds=0.0)

    if step:
        facts.send("resumed", step=step, checkpoint=f"step-{step}", seconds=0.0, world=int(os.environ["WORLD_SIZE"]))
    else:
        facts.send("started_fresh")
    first, saves = True, 0
    while True:
        time.sleep(0.05)
        step += 1
        page.beat(step)
        if first:
            facts.send("first_step", step=step)
            first = False
        orders = page.orders()
        if orders.stop:
            save()
            facts.send("stopped", step=step, why=orders.cause, saved=True)
            break
        if step % EVERY == 0 or orders.save > saves:
            saves = orders.save
            save()
        if step == 5 and sys.argv[1:]:
            fail(sys.argv[1], run_dir)
        if (run_dir / "rotten").exists():
            fail("raise", run_dir)
        if (run_dir / "enough").exists():
            facts.send("finished", step=step, outcome="completed")
            break
    page.done()
    sys.exit(0)


if __name__ == "__main__":
    main()
