"""How long it takes to find the latest valid checkpoint: our index beside a directory scan, at 10 to 10,000 checkpoints.

The scan is torchtitan's: list the directory, match ``step-(\\d+)``, look for ``.metadata`` in each, take the greatest.
Both look at the same directories; what is measured includes opening everything anew, as a job does when it starts.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import record

from slurm_resilience.checkpoint import filesystem, names
from slurm_resilience.checkpoint.digest import digest, sha256
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.manifest import Item, Manifest
from slurm_resilience.checkpoint.store import CheckpointStore

SIZES = (10, 100, 1_000, 10_000)


def fill(root: Path, count: int) -> None:
    """``count`` checkpoints as a long run leaves them when nothing is pruned: manifests, marks of DCP, history, head."""
    data = b"weights"
    file = names.shard_file(0)
    files = {file: {"bytes": len(data)}, names.METADATA: {"bytes": len(data), "sha256": sha256(data)}}
    items = [Item("weights", file, 0, len(data), 0, len(data), digest(data))]
    store = CheckpointStore.open(root, attempt=1, job_id="1", node="node1", boot_id="0" * 36)
    store.fence()
    for number in range(1, count):
        name = names.new_name(number * 10, 1)
        entry = Entry(name, number * 10, 1, 64, 2 * len(data), "", metrics={"loss": 1 / number}, **store.about)
        raw = Manifest(entry, files, items).to_bytes()
        (root / name).mkdir()
        for each, content in ((file, data), (names.METADATA, data), (names.MANIFEST, raw)):
            (root / name / each).write_bytes(content)
        store.index.append("commit", 0.0, entry=Manifest.from_bytes(raw, name).entry.to_json())
    store.rebuild()
    draft = store.begin(count * 10)
    for each in (file, names.METADATA):
        (draft.path / each).write_bytes(data)
    store.commit(draft, world=64, files=files, items=items, metrics={"loss": 0.1})


def lookup(root: Path) -> int:
    entry = CheckpointStore.open(root).latest()
    assert entry is not None
    return entry.step


def scan(root: Path) -> int:
    found = [-1]
    for name in os.listdir(root):
        match = re.search(r"step-(\d+)", name)
        if match and os.path.isfile(os.path.join(root, name, ".metadata")):
            found.append(int(match.group(1)))
    return max(found)


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=300, help="lookups of each size (scans: a tenth)")
    parser.add_argument("--dir", help="where to make the checkpoints (default: the temporary directory)")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="bench-index-", dir=args.dir))
    lookups: dict[int, list[float]] = {count: [] for count in SIZES}
    scans: dict[int, list[float]] = {count: [] for count in SIZES}
    try:
        for count in SIZES:
            fill(base / str(count), count)
        for turn in range(args.repeat):
            for count in SIZES:
                clock = record.Clock()
                step = lookup(base / str(count))
                lookups[count].append(clock.read())
                assert step == count * 10
                if turn % 10 == 0:
                    clock = record.Clock()
                    step = scan(base / str(count))
                    scans[count].append(clock.read())
                    assert step == count * 10
        where = str(filesystem.of(base))
    finally:
        shutil.rmtree(base)
    figures: dict[str, float | None] = {}
    for count in SIZES:
        figures[f"lookup_{count}_s"] = record.median(lookups[count])
        figures[f"scan_{count}_s"] = record.median(scans[count])
    record.emit(
        args,
        "index",
        figures,
        packages=("filelock", "xxhash"),
        filesystem=where,
        repetitions={"lookup": args.repeat, "scan": len(scans[SIZES[0]])},
        ratios={
            "lookup_10000_over_10": record.median(lookups[10_000]) / record.median(lookups[10]),
            "scan_over_lookup_10000": record.median(scans[10_000]) / record.median(lookups[10_000]),
        },
    )


if __name__ == "__main__":
    main()
