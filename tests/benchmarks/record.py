"""What every benchmark prints: one JSON object with the machine, the versions, the repetitions and the figures."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", metavar="FILE", help="also write the object there")
    return made


def machine() -> dict[str, Any]:
    """Where this was measured."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = os.getloadavg()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": pages,
        "kernel": platform.release(),
        "load_before": round(load[0], 2),
    }


def versions(*packages: str) -> dict[str, str]:
    out = {"python": platform.python_version()}
    for package in ("slurm-resilience", *packages):
        out[package] = importlib.metadata.version(package)
    return out


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> dict[str, float]:
    """Smallest, median and largest, beside the median that is the figure."""
    return {"min": min(values), "median": median(values), "max": max(values)}


def emit(
    args: argparse.Namespace, name: str, figures: dict[str, float | None], *, packages: tuple[str, ...] = (), **more: Any
) -> None:
    """Print the object, and write it where ``--json`` says."""
    document = {
        "benchmark": name,
        "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(*packages),
        **more,
        "figures": figures,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def read(self) -> float:
        return time.perf_counter() - self._began
