"""What a beat costs a rank: ``Run``'s report to its agent after every step, through the shared-memory page.

``beat_s`` is the median over rounds of the mean of many beats, ``section_s`` is what
entering and leaving a section costs, ``system_call_s`` what writing one byte to nowhere costs, for comparison.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import record

from slurm_resilience.progress.page import PageReader, PageWriter, Phase
from slurm_resilience.progress.sections import LEARNED

BEATS = 200  # a round is over before another process gets the core, mostly; so the median is not about the neighbours


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=5_000, help=f"rounds of {BEATS} beats")
    parser.add_argument("--dir", default="/dev/shm", help="where the page is (default: where agents have it)")
    args = parser.parse_args()
    beats: list[float] = []
    entered: list[float] = []
    written: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-heartbeat-", dir=args.dir) as folder:
        path = Path(folder) / "page"
        reader = PageReader(path)
        page = PageWriter(path)
        page.enter(Phase.STEP)
        null = os.open(os.devnull, os.O_WRONLY)
        for number in range(args.repeat):
            clock = record.Clock()
            for step in range(BEATS):
                page.beat(step)
            beats.append(clock.read() / BEATS)
            clock = record.Clock()
            for _ in range(BEATS // 10):
                page.push("eval", Phase.EVALUATION, LEARNED)
                page.pop()
            entered.append(clock.read() / (BEATS // 10))
            clock = record.Clock()
            for _ in range(BEATS // 10):
                os.write(null, b"x")
            written.append(clock.read() / (BEATS // 10))
            seen = reader.read()
            assert seen.beats == 1 + (number + 1) * (BEATS + 2 * (BEATS // 10)), "the other end did not see every beat"
        os.close(null)
        reader.close()
    figures: dict[str, float | None] = {
        "beat_s": record.median(beats),
        "section_s": record.median(entered),
        "system_call_s": record.median(written),
    }
    record.emit(
        args,
        "heartbeat",
        figures,
        repetitions={"rounds": args.repeat, "beats_each": BEATS},
        spread={"beat_s": record.spread(beats)},
        ratios={"beat_over_system_call": record.median(beats) / record.median(written)},
    )


if __name__ == "__main__":
    main()
