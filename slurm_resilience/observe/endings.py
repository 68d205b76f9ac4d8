"""How did a run end that did not reach the end of its work?  Said once: a reason mostly begins with its cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_resilience.observe.failures import word_of


def ending(event: Mapping[str, Any]) -> str:
    """The sentence for a ``run_failed`` event: cause and reason, without saying the cause twice."""
    cause, reason = word_of(event) or "unknown", str(event.get("reason") or "")
    known = reason.startswith((cause, cause.replace("_", " ")))
    return reason if known else f"{cause}: {reason}" if reason else cause
