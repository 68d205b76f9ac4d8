"""The recorded answers of a real Slurm, for tests of what is read from them."""

from __future__ import annotations

from pathlib import Path

from slurm_resilience.slurm.records import JobRecord

RECORDED = Path(__file__).parent / "recorded"


def text(name: str) -> str:
    """What the command printed; the first line of the file says which it was."""
    header, _, rest = (RECORDED / name).read_text().partition("\n")
    assert header.startswith("# recorded: Slurm "), f"{name} does not say how it was recorded"
    return rest


def lines(name: str, start: str) -> list[str]:
    return [line for line in text(name).splitlines() if line.startswith(start)]


def jobs(name: str) -> list[JobRecord]:
    return [JobRecord.parse(line) for line in lines(name, "JobId=")]


def job(name: str) -> JobRecord:
    (one,) = jobs(name)
    return one
