"""The process that hosts c10d's key-value store for one attempt, so that its end is not that of rank 0.

Standard library and torch only, loaded by file path: the launcher's interpreter need not have this package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import NoReturn


def listen() -> socket.socket:
    """A listening socket on a free port, for IPv4 and, where there is any, IPv6."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("0.0.0.0", 0), backlog=4096)  # noqa: S104 -- the ranks of other nodes dial it


def serve(fd: int, ready: int | None = None) -> NoReturn:
    """Serve c10d's key-value store on a listening socket until killed; writes a byte to ``ready`` when it does."""
    import datetime

    for sig in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    sock = socket.socket(fileno=fd)
    store = TCPStore(
        "127.0.0.1", sock.getsockname()[1], None, True, datetime.timedelta(seconds=60),
        wait_for_workers=False, use_libuv=True, master_listen_fd=sock.detach(),
    )  # fmt: skip
    if ready is not None:
        os.write(ready, b"1")
    while store is not None:
        signal.pause()
    raise AssertionError("unreachable")
