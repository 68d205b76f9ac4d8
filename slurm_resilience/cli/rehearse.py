"""Hurt your own job on purpose, before the cluster does: it runs in the sandbox through a list of faults.

    sudo slurm-resilience rehearse train.py --faults kill-rank,power-off,preempt,time-limit --args='--lr 3e-4'
    sudo slurm-resilience rehearse job.sbatch --faults kill-rank,preempt
    slurm-resilience rehearse train.py --local --faults kill-rank

SCRIPT is a Python script or a batch script that calls `slurm-resilience run`.  One without a Run needs --checkpoint-file.
The job must save within --within seconds, and train on until the last fault.  Ends with 0 when the job survives all of it,
with 1 when it does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from slurm_resilience.errors import ExitCode


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="the Python script, or the batch script")
    add("--args", default="", metavar="WORDS", help="arguments for the Python script, in one word: --args='--lr 3e-4'")
    add("--faults", default="kill-rank,power-off,preempt,time-limit", metavar="F,…",
        help="kill-rank, hang-rank, kill-agent, kill-supervisor, power-off, preempt, time-limit (default: "
             "kill-rank,power-off,preempt,time-limit)")  # fmt: skip
    add("--nodes", default="1-2", metavar="MIN[-MAX]", help="nodes for a Python script (default: 1-2)")
    add("--ranks-per-node", type=int, default=1, metavar="K", help="ranks on each node, for a Python script (default: 1)")
    add("--checkpoint-file", default="", metavar="NAME", help="as for `run`: a script without a Run saves into this file")
    add("--resume-with", default="", metavar="ARGS", help="as for `run`: arguments when there is a file to go on from")
    add("--options", default="", metavar="WORDS", help="further options of `run`, in one word")
    add("--within", type=float, default=300.0, metavar="S", help="longest wait for each thing in seconds (default: 300)")
    add("--local", action="store_true", help="without Slurm and root: kill-rank and hang-rank only")
    add("--name", default="rehearse", help="which sandbox (default: rehearse; brought up, and down again)")
    add("--json", action="store_true", help="print one JSON document")


def execute(args: argparse.Namespace) -> int:
    """Rehearse, and print the verdict."""
    from slurm_resilience.rehearse.wish import Wish, check, faults_of, words_of

    wish = Wish(
        script=Path(args.script).absolute(), args=words_of(args.args), faults=faults_of(args.faults), nodes=args.nodes,
        ranks_per_node=args.ranks_per_node, checkpoint_file=args.checkpoint_file, resume_with=args.resume_with,
        options=args.options, within_s=args.within,
    )  # fmt: skip
    check(wish, local=args.local)
    from slurm_resilience.observe.events import read_events
    from slurm_resilience.rehearse import stage as stages
    from slurm_resilience.rehearse import verdict

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    stage: stages.Stage = stages.OnThisMachine(wish) if args.local else stages.OnSlurm(wish, name=args.name)
    try:
        blows = stages.rehearse(stage, wish, say=say)
    finally:
        stage.close()
    found = verdict.outcomes(blows, read_events(stage.run_dir) if stage.run_dir.is_dir() else [])
    where = "this machine alone" if args.local else "a real Slurm on this machine"
    about = {"script": str(wish.script), "where": where, "run_dir": str(stage.run_dir), "asked": list(wish.faults)}
    print(json.dumps(verdict.as_dict(found, about)) if args.json else verdict.page(found, about))
    return ExitCode.OK if len(found) == len(wish.faults) and all(one.ok for one in found) else 1
