"""What a clean prolog and epilog of ours cost a job, on real slurmd-like calls, against bare starts of bash and python.

    sudo python tests/benchmarks/hooks.py [--runs 31] [--json FILE]

The hooks are installed into a folder of root's as an admin would, with the checks that ship; the system's Python runs
them.  Runs alternate, so that a busy machine is busy for all.  NHC is measured when `nhc` is on PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from slurm_resilience.hooks.admin import install
from slurm_resilience.hooks.admin.entries import Places
from tests.benchmarks import record

JOB = {
    "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "1", "SLURM_JOB_UID": "65001", "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_EXIT_CODE": "0",
}  # fmt: skip


def seconds(argv: list[str]) -> float:
    started = time.perf_counter()
    null = subprocess.DEVNULL
    subprocess.run(argv, env=JOB, cwd="/", stdin=null, stdout=null, stderr=null, check=True)
    return time.perf_counter() - started


def main() -> None:
    options = record.parser(__doc__)
    options.add_argument("--runs", type=int, default=31, help="of each (default: 31)")
    args = options.parse_args()
    if os.geteuid() != 0:
        options.error("hooks are root's: use sudo")
    folder = Path(tempfile.mkdtemp(prefix="srh-benchmark-", dir="/opt"))
    folder.chmod(0o755)
    try:
        places = Places(folder / "prefix", folder / "hooks.yaml", folder / "state", install.python_of(None))
        install.apply(install.plan(places))
        seconds([str(places.entry("healthcheck"))])  # the verdict that the prolog then believes
        commands = {
            "prolog": [str(places.entry("prolog"))],
            "epilog": [str(places.entry("epilog"))],
            "bash": ["/bin/bash", "-c", "exit 0"],
            "python": [str(places.python), "-I", "-S", "-c", "pass"],
        }
        node_python = str(places.python)
        nhc = shutil.which("nhc")
        if nhc:
            commands["nhc"] = [nhc]
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(args.runs):
            for name, argv in commands.items():
                times[name].append(seconds(argv))
        ledger = [path.read_text() for path in folder.glob("state/*/ledger.jsonl")]
    finally:
        install.uninstall(
            Places(folder / "prefix", folder / "hooks.yaml", folder / "state", Path("/usr/bin/python3")), purge=True
        )
        shutil.rmtree(folder, ignore_errors=True)
    figures: dict[str, float | None] = {f"{name}_p50_s": record.median(values) for name, values in times.items()}
    figures.setdefault("nhc_p50_s", None)
    record.emit(
        args,
        "hooks",
        figures,
        repetitions=args.runs,
        spread={name: record.spread(values) for name, values in times.items()},
        node_python=node_python,
        notes={} if nhc else {"nhc_p50_s": "null: LBNL NHC is not on PATH; Debian and PyPI do not have it"},
        clean=not any("own_error" in text for text in ledger),
    )


if __name__ == "__main__":
    main()
