"""One node's part in a check of the nodes: a small computation alone, then with a partner, then with another one.

Run by the user's interpreter as a rank of an attempt of its own.  Standard library and torch only, loaded by file path: that
interpreter need not have this package.  What it finds it tells its agent; the verdict is not its own.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

_REPEAT = 5
_SIDE = {"cpu": 512, "cuda": 4096}
_ELEMENTS = 1 << 18
_LOOK_S = 0.02


def main() -> None:
    """Compute, and tell how long it took.  The supervisor ends this process when it has heard enough."""
    began = time.monotonic()
    plan = json.loads(os.environ["RESILIENCE_PLAN"])["check"]
    # A collective that does not end is an exception of this process, not its death.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if device == "cuda" else ["cpu"]
    works = [_matmul(torch, each, _SIDE[device]) for each in devices]
    store = _store(plan["here_s"])
    _meet(store, began + plan["here_s"])
    tell(part="alone", seconds=max(min(_timed(work) for _ in range(_REPEAT)) for work in works))
    for number, group in enumerate(plan["groups"]):
        left = began + plan["until_s"][number] - time.monotonic()
        try:
            seconds = _together(torch, store, number, group, works[0], devices[0], max(1.0, left))
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is what was to be found
            print(f"round {number + 1}, with {group}: {error}", file=sys.stderr, flush=True)
            tell(part=number, seconds=None)
        else:
            tell(part=number, seconds=seconds)


def tell(**fields: Any) -> None:
    """One fact to the agent; the datagram is that of ``progress.facts``."""
    who = {"attempt": int(os.environ["RESILIENCE_ATTEMPT"]), "rank": int(os.environ["RANK"])}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1.0)
        sock.sendto(json.dumps({"kind": "node_checked", **who, "fields": fields}).encode(), os.environ["RESILIENCE_FACTS"])


def _matmul(torch: Any, device: str, side: int) -> Callable[[], None]:
    made = torch.ones((side, side), device=device)

    def work() -> None:
        made @ made
        if device != "cpu":
            torch.cuda.synchronize(device)

    work()  # what the first one loads is not the node's speed
    return work


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _store(within_s: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, datetime.timedelta(seconds=within_s),
        wait_for_workers=False,
    )  # fmt: skip


def _meet(store: Any, deadline: float) -> None:
    """Begin together; who does not come in time is not waited for."""
    store.add("here", 1)
    while store.add("here", 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _together(
    torch: Any, store: Any, number: int, group: list[int], work: Callable[[], None], device: str, within_s: float
) -> float:
    """Seconds of some computations and reductions in a process group of these ranks alone."""
    import torch.distributed as dist

    apart = dist.PrefixStore(f"round-{number}-{min(group)}", store)  # type: ignore[attr-defined]
    apart.set_timeout(datetime.timedelta(seconds=within_s))
    dist.init_process_group(
        "nccl" if device != "cpu" else "gloo", store=apart, rank=sorted(group).index(int(os.environ["RANK"])),
        world_size=len(group), timeout=datetime.timedelta(seconds=within_s),
    )  # fmt: skip
    try:
        data = torch.ones(_ELEMENTS, device=device)

        def step() -> None:
            work()
            dist.all_reduce(data)
            if device != "cpu":
                torch.cuda.synchronize(device)

        step()
        return sum(_timed(step) for _ in range(_REPEAT))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
