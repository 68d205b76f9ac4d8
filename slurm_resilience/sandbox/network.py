"""The sandbox's own network: one namespace a host, one with a bridge, nothing on the machine's side.

No interface, route or address of the machine is touched, so that sandboxes can neither meet each other nor anything
outside, and need no free subnet.
"""

from __future__ import annotations

import subprocess

from slurm_resilience.errors import SandboxError
from slurm_resilience.sandbox.layout import NETNS_DIR, PREFIX, SWITCH, Layout, address
from slurm_resilience.sandbox.packages import path_of


def create(layout: Layout, hosts: list[str]) -> None:
    """The namespaces of all hosts, joined by a bridge.  What an earlier, dead sandbox of this name left is removed first."""
    remove(layout)
    switch = layout.netns(SWITCH)
    _batch([f"netns add {layout.netns(host)}" for host in (SWITCH, *hosts)])
    lines = ["link add name br0 type bridge", "link set br0 up"]
    for host in hosts:
        lines += [
            f"link add name {host} type veth peer name eth0 netns {layout.netns(host)}",
            f"link set {host} master br0 up",
        ]
    _batch(lines, namespace=switch)
    for host in hosts:
        lines = [f"addr add {address(host)}/16 dev eth0", "link set eth0 up", "link set lo up"]
        _batch(lines, namespace=layout.netns(host))


def remove(layout: Layout) -> None:
    """No namespace of this sandbox is left, however many there were."""
    names = present(layout)
    if names:
        _batch([f"netns del {name}" for name in names])


def present(layout: Layout) -> list[str]:
    """The sandbox's network namespaces that exist."""
    prefix = f"{PREFIX}-{layout.name}-"
    if not NETNS_DIR.is_dir():
        return []
    found = []
    for entry in NETNS_DIR.iterdir():
        host = entry.name.removeprefix(prefix)
        # another sandbox may be called NAME-something: only our own hosts' names count
        if entry.name.startswith(prefix) and (host in ("ctl", "login", SWITCH) or (host[:1] == "n" and host[1:].isdigit())):
            found.append(entry.name)
    return sorted(found)


def set_link(layout: Layout, host: str, *, up: bool) -> None:
    """Plug the host's cable in, or pull it: then no packet passes, and no FIN or RST tells anybody."""
    _batch([f"link set {host} {'up' if up else 'down'}"], namespace=layout.netns(SWITCH))
    if link_is_up(layout, host) != up:
        raise SandboxError(
            f"The link of {host} did not go {'up' if up else 'down'}", evidence="`ip link` still says the opposite"
        )


def link_is_up(layout: Layout, host: str) -> bool:
    """Is the host's cable plugged in?"""
    result = subprocess.run(
        [path_of("ip"), "-n", layout.netns(SWITCH), "-o", "link", "show", "dev", host],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    flags = result.stdout.partition("<")[2].partition(">")[0].split(",")
    return "UP" in flags


def _batch(lines: list[str], *, namespace: str | None = None) -> None:
    command = [path_of("ip"), *(["-n", namespace] if namespace else []), "-batch", "-"]
    result = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SandboxError(
            "The sandbox's network cannot be set up",
            evidence=f"`{' '.join(command)}` said: {' '.join(result.stderr.split())}",
            remedy="network namespaces, veth and bridge are needed; a container must run with --privileged",
        )
