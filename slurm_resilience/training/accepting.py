"""The mark that a run trains on from a checkpoint, written behind its first step: on a shared file system it takes a while.

Losing it, because the process ends in that moment, costs little: the checkpoint then counts as one whose load was begun.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from slurm_resilience.errors import Fenced

log = logging.getLogger(__name__)


class Acceptance:
    """One mark on its way.  Nothing else may be written to the same store before :meth:`wait` has returned."""

    def __init__(self, write: Callable[[], Any]) -> None:
        self._write = write
        self._fenced: Fenced | None = None
        self._thread = threading.Thread(target=self._work, name="accept-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until the mark is set, or could not be, which was said.  Raises :class:`Fenced` for a newer attempt."""
        self._thread.join()
        if self._fenced is not None:
            raise self._fenced

    def _work(self) -> None:
        try:
            self._write()
        except Fenced as error:
            self._fenced = error
        except Exception as error:  # noqa: BLE001 - a mark that is missing is no reason to end a run that is good
            log.error("training goes on, but its checkpoint could not be marked as verified: %s", error)
