"""Is this agent to take the place of the supervisor?  Only on proof that there is none, and only one agent of all.

An agent that hears nothing may be the one that was cut off.  So it looks into the run folder, too: while the supervisor's
pulse moves there, or anything new comes up, nobody is replaced.  Who then claims the next epoch first is the next supervisor.
What cannot be read counts as unknown, and the count begins again; so it does when this process was stopped itself.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_resilience.errors import FormatError
from slurm_resilience.runtime import epochs
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.run_folder import RunFolder

_LOOK_AFTER_S = 1.0
_LOOK_EVERY_S = 0.5
_READ_S = 2.0
_JITTER_S = 0.4
# Where the supervisor's machine answers that nobody listens, its batch script is about to start another.
_RESTART_S = 15.0
# Who has claimed an epoch has announced itself by then, or has died before.
_ANNOUNCE_S = 10.0


class Election:
    """``patience_s``: how long a supervisor must have shown no sign; 0: never take its place.

    ``elected(epoch, silent_s)`` is called when this agent has won; ``news()`` when another supervisor is there.
    """

    def __init__(
        self, loop: Loop, run_dir: Path, node: str, *, patience_s: float,
        elected: Callable[[int, float], None], news: Callable[[], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._loop, self._run_dir, self._node = loop, run_dir, node
        self._patience_s = patience_s + random.uniform(0, _JITTER_S) if patience_s else 0.0  # noqa: S311 -- only spreads claims
        self._elected, self._news, self._say = elected, news, say
        self._seen: dict[str, Any] | None = None
        self._same_since = 0.0
        self._look_at = 0.0
        self._looking = False
        self._alone_s = 0.0
        self._now = 0.0
        self._refused = False

    def tick(self, now: float, *, alone_s: float, refused: bool) -> None:
        """``alone_s``: how long nothing was heard; ``refused``: the supervisor's machine lives, but nobody listens there."""
        self._now, self._alone_s, self._refused = now, alone_s, refused
        if not self._patience_s or alone_s < _LOOK_AFTER_S:
            self._seen = None
        elif not self._looking and now >= self._look_at:
            self._looking = True
            run_dir = self._run_dir
            self._loop.aside(lambda: _look(run_dir), self._saw, within_s=_READ_S)

    def begin_again(self) -> None:
        """We did not look for a while: nothing that was seen before counts."""
        self._seen = None

    def _saw(self, raw: dict[str, Any] | None) -> None:
        self._looking, self._look_at = False, self._now + _LOOK_EVERY_S
        if raw is None or "error" in raw or self._alone_s < _LOOK_AFTER_S:
            self._seen = None
            return
        before, self._seen = self._seen, raw
        if before != raw:
            self._same_since = self._now
            if before is not None and before["epoch"] != raw["epoch"]:
                self._news()
            return
        if raw["state"] != "running" or raw["job_id"] in ("", "local"):
            return
        wanted = max(self._patience_s, _RESTART_S) if self._refused else self._patience_s
        if raw["claimed"] > raw["epoch"]:
            wanted = max(wanted, _ANNOUNCE_S)
        if self._alone_s >= wanted and self._now - self._same_since >= wanted - _LOOK_AFTER_S:
            epoch = max(raw["claimed"], raw["epoch"]) + 1
            self._looking = True
            run_dir, who = self._run_dir, f"{self._node} ({socket.gethostname()})"
            self._loop.aside(lambda: epochs.claim(run_dir, epoch, who), lambda won: self._claimed(epoch, won), within_s=_READ_S)

    def _claimed(self, epoch: int, won: bool | None) -> None:
        self._looking, self._seen = False, None
        if won:
            self._say(f"no sign of a supervisor for {self._alone_s:.1f} s: taking its place, epoch {epoch}")
            self._elected(epoch, self._alone_s)
        else:
            self._say(f"epoch {epoch} went to another agent" if won is False else f"epoch {epoch} could not be claimed")


def _look(run_dir: Path) -> dict[str, Any]:
    """Done aside, since the run folder may hang."""
    try:
        found, status = SupervisorAddress.read(run_dir), RunFolder(run_dir).status()
        return {
            "epoch": found.epoch if found is not None else 0,
            "job_id": found.job_id if found is not None else "",
            "claimed": epochs.newest(run_dir),
            "pulse": epochs.pulse(run_dir),
            "state": status.state if status is not None else "",
        }
    except (FormatError, OSError) as error:
        return {"error": str(error)}
