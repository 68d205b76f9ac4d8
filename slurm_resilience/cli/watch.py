"""Get your requeued jobs started in seconds, from a login node.

    slurm-resilience watch                 until Ctrl-C, for your own jobs
    slurm-resilience watch --once          one look; help what is stuck, say what cannot be helped

Slurm keeps a requeued job back for two minutes.  A job of ours shortens that by itself to 4-35 s; with this beside it,
it is 2-4 s, also when the job's own supervisor died with its node.  Jobs that a requeue left held, or that Slurm holds after
a failed prolog, are released (a bounded number of times) or explained.  Runs as you, changes nothing but your own jobs, and
asks Slurm one question every --every seconds.  Where the admin has installed the expediter hook it is not needed.
"""

from __future__ import annotations

import argparse
import getpass
import json
import time
from typing import Any

from slurm_resilience.errors import ConfigError, ExitCode


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add(
        "--every",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between two looks while nothing is on its way (default: 2)",
    )
    add("--all", action="store_true", help="also those of your jobs that were not submitted through slurm-resilience")
    add("--once", action="store_true", help="one look, then end")
    add("--dry-run", action="store_true", help="say what would be done; change nothing")
    add("--json", action="store_true", help="print each line as a JSON document; with --once one document")


def execute(args: argparse.Namespace) -> int:
    """Watch until interrupted, or look once."""
    from slurm_resilience.slurm.client import CommandClient
    from slurm_resilience.slurm.watch import Watch

    if args.every < 0.5:
        raise ConfigError(f"--every {args.every:g} would keep the controller busy", remedy="half a second is the least")
    client, found = CommandClient(), []

    def tell(job_id: str, what: str, **facts: Any) -> None:
        document = {"t": round(time.time(), 3), "job": job_id or None, "what": what, **facts}
        if args.once and args.json:
            found.append(document)
        else:
            print(json.dumps(document) if args.json else _sentence(document), flush=True)

    watch = Watch(client, getpass.getuser(), tell=tell, every_s=args.every, all_jobs=args.all, act=not args.dry_run)
    client.config()  # no Slurm here is an error now, not a line every two seconds
    if args.once:
        watch.round()
        if args.json:
            print(json.dumps({"jobs": found}))
        elif not found:
            print("no job of yours is stuck")
        return ExitCode.OK
    while True:
        time.sleep(watch.round())


def _sentence(it: dict[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(it["t"]))
    words = {
        "expedited": "{job}: started {waited_s} s after it was queued ({detail})",
        "released": "{job}: {detail}",
        "cannot_start": "{job} cannot start: {detail}",
        "found": "{job}: {trouble} ({detail}); nothing was done",
        "refused": "{job}: Slurm refused ({detail})",
        "no_answer": "Slurm does not answer: {detail}",
        "answers_again": "Slurm answers again",
    }[it["what"]]
    return f"{clock} {'job ' if it['job'] else ''}{words.format(**it)}"
