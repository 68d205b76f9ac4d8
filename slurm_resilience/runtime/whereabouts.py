"""At which numeric address do the other nodes of an allocation reach this process?

Not at what the host name resolves to: that is a loopback address on many installations (Debian's 127.0.1.1), or another
network than the one that the nodes share.  The kernel is asked which of our addresses it would use towards them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from slurm_resilience.errors import ConfigError


def address_towards(hosts: Iterable[str]) -> str:
    """Our address on the way to the first of ``hosts`` (names or addresses) that can be resolved and is another machine.

    Loopback when there is no other machine.  Sends no packet.  Raises :class:`ConfigError` when none can be resolved.
    """
    wanted = list(hosts)
    if not wanted:
        return "127.0.0.1"
    problems: list[str] = []
    for host in wanted:
        try:
            found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        except OSError as error:
            problems.append(f"{host}: {error}")
            continue
        for family, _, _, _, target in found:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(target)
                except OSError as error:
                    problems.append(f"{host} at {target[0]}: {error}")
                    continue
                return str(probe.getsockname()[0])
    raise ConfigError(
        "No other node of this job can be reached from here",
        evidence="; ".join(problems[:5]),
        remedy="node names must resolve on every node, or NodeAddr must be set in slurm.conf",
    )
