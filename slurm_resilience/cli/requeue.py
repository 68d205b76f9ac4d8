"""Give a job other nodes now: it saves, goes back into the queue, and starts again in seconds, not in two minutes.

    slurm-resilience requeue 4711
    slurm-resilience requeue 4711_3 --exclude n07,n09        one task of an array, away from two nodes
    slurm-resilience requeue resilience-runs/gpt-… --nodes 2-6

JOB is a job id or the folder of a run.  What you or the admin excluded stays excluded; what is excluded here is allowed
again an hour later.  Exclusions that would leave too few nodes are dropped, and said.  A cancelled or complete job is
not brought back.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_resilience.cli.document import document
from slurm_resilience.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from slurm_resilience.slurm.client import SlurmClient
    from slurm_resilience.slurm.records import JobRecord


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("job", metavar="JOB", help="a job id (ARRAY_TASK for one task of an array), or the folder of a run")
    add("--nodes", metavar="MIN[-MAX]", help="ask for that many nodes from now on")
    add("--exclude", default="", metavar="NODES", help="nodes to keep away from, e.g. n07,n[09-11]")
    add("--within", type=float, default=180.0, metavar="S", help="longest wait for its end (default: 180)")
    add("--dry-run", action="store_true", help="say what would be done; change nothing")
    add("--json", action="store_true", help="print one JSON document")


def execute(args: argparse.Namespace) -> int:
    """Check, requeue, reshape, start; 0 once it is free to start."""
    from slurm_resilience.runtime.by_hand import move, refusal
    from slurm_resilience.slurm.client import CommandClient
    from slurm_resilience.slurm.nodeset import expand

    nodes, exclude = _range(args.nodes), expand(args.exclude)
    client = CommandClient()
    record = _record(client, args.job)
    why = refusal(record)
    if why:
        raise ConfigError(f"Job {record.job_id} is not requeued: {why}", evidence=_seen(record))
    unknown = sorted(set(exclude) - set(client.nodes(exclude))) if exclude else []
    if args.dry_run:
        wishes = [f"nodes {nodes[0]}-{nodes[1]}" if nodes else "", f"without {args.exclude}" if exclude else ""]
        said = f"job {record.job_id} ({_seen(record)}) would be requeued {' '.join(filter(None, wishes))}".rstrip()
        print(json.dumps({"job_id": record.job_id, "dry_run": True, "said": said}) if args.json else said)
        return ExitCode.OK
    show = (lambda line: None) if args.json else (lambda line: print(line, flush=True))
    done = move(client, record, nodes=nodes, exclude=exclude, within_s=args.within, show=show)
    dropped = sorted(set(exclude) - set(done.excluded))
    if args.json:
        print(json.dumps({"job_id": record.job_id, "ok": done.ok, "running": done.running, "said": done.said,
                          "nodes": list(done.nodes) if done.nodes else None, "excluded": list(done.excluded),
                          "not_excluded": dropped}))  # fmt: skip
    else:
        print(f"job {record.job_id}: {done.said}")
        if dropped:
            why_not = "no such node" if set(dropped) <= set(unknown) else "unknown, or too few nodes would be left"
            print(f"not excluded: {', '.join(dropped)} ({why_not})")
    return ExitCode.OK if done.ok else ExitCode.LAUNCH_FAILED


def _record(client: SlurmClient, text: str) -> JobRecord:
    """The job that is meant: of a run folder the one at work, else the one that was last submitted for it."""
    from slurm_resilience.submit.at_work import at_work

    if re.fullmatch(r"\d+(_\d+|\+\d+)?", text):
        return client.job(text)
    return next(iter(at_work(client, Path(text))), None) or client.job(_job_id(text))


def _job_id(text: str) -> str:
    for name in ("job.json", "supervisor.json"):
        job_id = str(document(Path(text) / name).get("job_id", ""))
        if re.fullmatch(r"\d+(_\d+|\+\d+)?", job_id):
            return job_id
    raise ConfigError(
        f"{text!r} is neither a job id nor the folder of a run in Slurm",
        evidence="a job id looks like 4711 or 4711_3; the folder of a run holds job.json or supervisor.json",
    )


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(f"--nodes {text!r} is no number of nodes", remedy="write 4, or 2-4 for the fewest and the most")
    return low, high


def _seen(record: JobRecord) -> str:
    on = f" on {','.join(record.nodes)}" if record.nodes else ""
    return f"{record.state}{on}, Restarts={record.restarts}" + (f", Reason={record.reason}" if record.reason else "")
