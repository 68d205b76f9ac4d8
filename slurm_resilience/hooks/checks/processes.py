"""Whose processes run here?  By number and cgroup, never by a name or a part of one."""

import os

from . import Host

EXITING = 0x4  # PF_EXITING in the flags of proc(5), stat


class Process:
    """One process as /proc shows it."""

    def __init__(self, pid: int, uid: int, state: str, start: str, ending: bool = False) -> None:
        self.ending = ending  # it has got its signal and gives its memory back, which may take it long
        self.pid = pid
        self.uid = uid
        self.state = state
        self.start = start


def of_uid(host: Host, uid: int) -> "list[Process]":
    """The processes whose real user this is; the dead that nobody has collected yet are none."""
    found = []
    for name in host.names("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(host.path("/proc/" + name)).st_uid != uid and not host.root:
                continue
        except OSError:
            continue
        process = read(host, int(name))
        if process is not None and process.uid == uid and process.state not in "ZX":
            found.append(process)
    return found


def read(host: Host, pid: int) -> "Process | None":
    """The process, or None when it is gone.  A process may call itself ``x) R 1``: its name ends at the last bracket."""
    stat = host.read(f"/proc/{pid}/stat", 4096)
    rest = stat[stat.rfind(")") + 2 :].split()
    uid = -1
    for line in host.read(f"/proc/{pid}/status", 65536).splitlines():
        if line.startswith("Uid:"):
            uid = int(line.split()[1])
            break
    if len(rest) <= 19:
        return None
    return Process(pid, uid, rest[0], rest[19], rest[6].isdigit() and bool(int(rest[6]) & EXITING))


def job_of(host: Host, pid: int) -> str:
    """The job that a process belongs to: by Slurm's cgroup, else by what Slurm put into its environment; "" for none."""
    for line in host.read(f"/proc/{pid}/cgroup", 65536).splitlines():
        for part in line.split("/"):
            if part.startswith("job_") and part[4:].isdigit():
                return part[4:]
    for entry in host.read(f"/proc/{pid}/environ", 1 << 20).split("\0"):
        name, _, value = entry.partition("=")
        if name == "SLURM_JOB_ID" and value.isdigit():
            return value
    return ""
