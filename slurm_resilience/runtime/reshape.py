"""Other nodes for a job in the queue: how many, which not, and how many tasks with them."""

from __future__ import annotations

from dataclasses import replace

from slurm_resilience.slurm.mark import Marks
from slurm_resilience.slurm.nodeset import expand, fold
from slurm_resilience.slurm.patient import Patient
from slurm_resilience.slurm.records import JobRecord

# Exclusions of ours expire: a suspect may have been repaired by then.  And they are few: the cluster is not ours alone.
EXCLUDED_S = 3600.0
MOST_EXCLUDED = 16


def reshape(
    slurm: Patient, marks: Marks, nodes: tuple[int, int] | None, exclude: tuple[str, ...]
) -> tuple[tuple[int, int] | None, tuple[str, ...], Marks]:
    """Ask for ``nodes`` = (fewest, most), without ``exclude`` (the most suspicious first): what was got, and the new marks.

    Each is a wish: where Slurm refuses one, the job runs without it.  What the user or the admin excluded stays; what we did
    is marked as ours, and expires.  Never raises for Slurm's failures.
    """
    record = slurm.look()
    if record is None:
        return None, (), marks
    fewest = nodes[0] if nodes else max(1, record.num_nodes[0])
    theirs = tuple(name for name in record.excluded if name not in marks.excluded)
    if slurm.clock.time() - (marks.excluded_at or 0.0) < EXCLUDED_S:
        exclude = tuple(dict.fromkeys([*exclude, *marks.excluded]))
    excluded = _affordable(slurm, record, exclude[:MOST_EXCLUDED], fewest, theirs)
    if excluded != record.excluded:
        required = [name for name in record.required if name not in excluded]
        if len(required) != len(record.required):
            slurm.wish("ReqNodeList", ReqNodeList=fold(required))
        if not slurm.wish("ExcNodeList", ExcNodeList=fold(excluded)):
            excluded = record.excluded
    ours = tuple(name for name in excluded if name not in theirs)
    if set(ours) != set(marks.excluded):
        marks = replace(marks, excluded=ours, excluded_at=slurm.clock.time() if ours else None)
    if nodes is None:
        return None, excluded, marks
    # Both ends, also when they are the same: a single number changes the fewest only.  Seen on 22.05.8.
    done = slurm.wish("NumNodes", NumNodes=f"{nodes[0]}-{nodes[1]}")
    per_node = _tasks_per_node(record)
    if per_node:
        # A stale number of tasks would keep the old number of nodes.  An elastic job carries none: Slurm gives it as many
        # nodes as there are only then.
        slurm.wish("NumTasks", NumTasks=str(per_node * fewest))
    return (nodes if done else None), excluded, marks


def _affordable(
    slurm: Patient, record: JobRecord, exclude: tuple[str, ...], fewest: int, theirs: tuple[str, ...]
) -> tuple[str, ...]:
    """``theirs`` and those of ``exclude`` that exist as nodes of the partition and leave at least ``fewest`` usable ones."""
    wanted = [name for name in exclude if name not in theirs]
    if not wanted:
        return theirs
    partition = slurm.partition(record)
    members = slurm.attempt("expand", lambda: expand(partition.get("Nodes", ""))) or ()
    known = slurm.attempt("show node", lambda: slurm.client.nodes(members)) if members else None
    if not known:
        return record.excluded  # without knowing what is left, excluding could leave nothing
    excluded = list(theirs)
    left = {name for name, node in known.items() if node.usable and name not in excluded}
    for name in wanted:
        if name in known and len(left - {name}) >= fewest:
            excluded.append(name)
            left.discard(name)
    return tuple(excluded)


def _tasks_per_node(record: JobRecord) -> int:
    """The job's own --ntasks-per-node; 0 when it asked for none.  Source: ``NtasksPerN:B:S:C=2:0:*:*`` in scontrol's record."""
    first = record.fields.get("NtasksPerN:B:S:C", "0").partition(":")[0]
    return int(first) if first.isdigit() else 0
