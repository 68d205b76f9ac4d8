"""May this process hold a connection to each node?  Each is an open file, and shells often allow 1024 of them."""

from __future__ import annotations

import resource

# Files, pipes of what starts the agents, and agents that dial again before their old connection is given up.
_OTHERS = 512
_PER_NODE = 2


def make_room(nodes: int) -> str:
    """Allow as many open files as so many nodes need, where the hard limit lets us; what is wrong otherwise, "" for nothing.

    A limit that is high enough is left alone, since Slurm hands it on to the processes of the job.
    """
    needed = nodes * _PER_NODE + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    if allowed >= nodes + _OTHERS:
        return ""
    return (
        f"{nodes} nodes need {nodes + _OTHERS} open files, and no more than {hard} are allowed here (ulimit -Hn): "
        f"agents beyond that cannot connect; ask the admin to raise the hard limit on this node"
    )
