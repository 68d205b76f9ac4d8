"""State that had to be kept elsewhere while /var was full or read-only comes home: a drain of ours must not be forgotten."""

import os

from . import files, ledger


def bring_home(away: str, home: str) -> None:
    """Move what one node's hooks have written in ``away`` to ``home``; what is there meanwhile is older.  Raises OSError."""
    files.private_folder(os.path.dirname(away))
    files.private_folder(away)
    lock = files.Lock(away + ".lock")
    if not lock.acquire():
        return  # somebody else is doing it
    try:
        for folder in ("", "epilogs"):
            _move(os.path.join(away, folder), files.private_folder(os.path.join(home, folder)))
        for folder in ("epilogs", ""):
            if os.path.isdir(os.path.join(away, folder)):
                os.rmdir(os.path.join(away, folder))
    finally:
        lock.release()


def _move(away: str, home: str) -> None:
    for name in sorted(os.listdir(away)) if os.path.isdir(away) else []:
        path = os.path.join(away, name)
        if name == ledger.NAME:
            for line in files.read(path, ledger.MOST_BYTES).splitlines():
                files.append(os.path.join(home, name), line)
        elif name.endswith(".json"):
            value = files.read_json(path)
            if value:
                files.write_json(os.path.join(home, name), value, sync=True)
        if not os.path.isdir(path):
            files.remove(path)
