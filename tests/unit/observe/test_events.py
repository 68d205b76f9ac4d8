"""The event file, when only part of a line finds room."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from slurm_resilience.observe.events import EventWriter, read_events


def test_after_a_torn_line_the_next_fact_has_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"v": 1, "seq": 3, "t": 1.0, "event": "a"}\n{"v": 1, "seq": 4, "ev')
    writer = EventWriter(tmp_path, restart=0)
    writer.write("b")
    writer.write("c")
    assert [(event["seq"], event["event"]) for event in read_events(tmp_path)] == [(3, "a"), (4, "b"), (5, "c")]


def test_a_line_of_which_only_a_part_found_room_spoils_no_other(tmp_path: Path) -> None:
    """The kernel takes the part that fits and refuses the rest, on a full disk as under a limit of file size."""
    program = textwrap.dedent(
        f"""
        import resource, signal
        from slurm_resilience.observe.events import EventWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = EventWriter({os.fspath(tmp_path)!r}, restart=0)
        writer.write("a")
        room = writer.path.stat().st_size + 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        for _ in range(2):
            try:
                writer.write("b")
            except OSError:
                continue
            raise SystemExit("the line was said to be written")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.write("b")
        writer.write("c")
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert [event["event"] for event in read_events(tmp_path)] == ["a", "b", "c"]
