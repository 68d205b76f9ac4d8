"""What does a small JSON document of a run folder say?  A damaged one is an error that names it, none is an empty answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurm_resilience._atomic import read_json
from slurm_resilience.errors import ConfigError


def document(path: Path) -> dict[str, Any]:
    """Its fields; empty where there is no such file, or no object in it.  Raises :class:`ConfigError` for a damaged one."""
    try:
        value = read_json(path)
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged: it is not JSON",
            evidence=str(error),
            remedy="move it away; what the run has done is in events.jsonl and in its checkpoints",
        ) from error
    return value if isinstance(value, dict) else {}
