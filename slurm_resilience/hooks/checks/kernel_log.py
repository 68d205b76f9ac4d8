"""The kernel's own lines since we last looked.

/dev/kmsg numbers its records and says who wrote them; a user's ``logger`` line is not in it, and what root writes into it
has another facility than the kernel's 0.  Source: Documentation/ABI/testing/dev-kmsg.  The cursor is (boot, number).
"""

import os

from .. import files
from . import Host

MOST_RECORDS = 100000
KMSG = "/dev/kmsg"


class Unreadable(Exception):
    """No kernel log that we may read: unknown, never "nothing happened"."""


def since(host: Host, boot: str, cursor: "dict[str, object]") -> "tuple[list[str], dict[str, object]]":
    """The new lines, and the cursor behind them.  On another boot it starts anew.  Raises :class:`Unreadable`."""
    last = files.integer(cursor.get("number"), -1) if cursor.get("boot") == boot else -1
    lines = []
    try:
        for number, text in _records(host):
            if number > last:
                last = number
                lines.append(text)
    except OSError as error:
        raise Unreadable(f"{KMSG}: {error.strerror}") from None
    return lines, {"boot": boot, "number": last}


def _records(host: Host) -> "list[tuple[int, str]]":
    found = []
    path = host.path(KMSG)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # a recorded log is an ordinary file of records
        raw = os.read(fd, 64 << 20).splitlines() if host.root else _live(fd)
    finally:
        os.close(fd)
    for record in raw:
        head, _, text = record.partition(b";")
        parts = head.split(b",")
        if len(parts) < 3 or not parts[0].isdigit() or not parts[1].isdigit():
            continue  # the " KEY=value" lines that follow a record
        if int(parts[0]) >> 3 == 0:  # facility 0: the kernel itself
            found.append((int(parts[1]), text.split(b"\n")[0].decode("utf-8", "replace")))
    return found


def _live(fd: int) -> "list[bytes]":
    records = []  # type: list[bytes]
    while len(records) < MOST_RECORDS:
        try:
            data = os.read(fd, 8192)
        except BlockingIOError:
            break
        except BrokenPipeError:  # overwritten while we read: the next read goes on with what is left
            continue
        if not data:
            break
        records.append(data)
    return records
