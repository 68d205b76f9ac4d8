"""Files are dated by the clock's last tick, and the clean-up leaves those alone that may be younger than its question."""

from __future__ import annotations

import time

from slurm_resilience.hooks.checks.tmpfiles import CLOCK_TICK_S


def age_files() -> None:
    """Return when what was made so far is older than any question asked from now on."""
    made = time.time()
    while time.time() <= made + 2 * CLOCK_TICK_S:
        time.sleep(CLOCK_TICK_S / 4)
