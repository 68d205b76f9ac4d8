"""``with run.section("eval"):`` what the time is spent on, and for how long that may take before it counts as a hang."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from slurm_resilience.errors import ConfigError
from slurm_resilience.progress.sections import LEARNED, NO_LIMIT, Phase
from slurm_resilience.training.link import Link

_PHASES = {
    "data": Phase.DATA,
    "eval": Phase.EVALUATION,
    "evaluation": Phase.EVALUATION,
    "validation": Phase.EVALUATION,
    "compile": Phase.COMPILE,
    "checkpoint": Phase.CHECKPOINT,
}


@contextmanager
def section(link: Link, name: str, limit: float | Literal["auto"] | None) -> Iterator[None]:
    """See :meth:`Run.section`.  Raises ConfigError for a limit that is none."""
    limit_s = _seconds(name, limit)
    if threading.current_thread() is not threading.main_thread():
        yield  # what another thread does says nothing about the training loop
        return
    link.push(name, _PHASES.get(name, Phase.USER), limit_s)
    try:
        yield
    finally:
        link.pop()


def _seconds(name: str, limit: object) -> float:
    if limit is None:
        return NO_LIMIT
    if limit == "auto":
        return LEARNED
    if isinstance(limit, (int, float)) and not isinstance(limit, bool) and limit > 0 and math.isfinite(limit):
        return float(limit)
    raise ConfigError(
        f"run.section({name!r}, limit={limit!r}) is no limit",
        remedy='give seconds (more than 0), "auto" for a limit that is learned, or None for none at all',
    )


class CompileWatch:
    """Compilation by torch.compile is a section of its own, also in the middle of a step, without a word from the user.

    Source: torch._dynamo.callback, there since torch 2.6.  Dynamo is not imported for this: it takes seconds.
    """

    def __init__(self, link: Link, *, began: Callable[[], None]) -> None:
        self._link = link
        self._tell = began
        self._handler: Any = None
        self._open = False

    def look(self) -> None:
        """Begin to watch, as soon as dynamo is there.  Costs one look into a dictionary until then, and nothing after."""
        if self._handler is not None:
            return
        module = sys.modules.get("torch._dynamo.callback")
        handler = getattr(module, "callback_handler", None)
        if handler is None or not hasattr(handler, "register_start_callback"):
            return
        self._handler = handler
        handler.register_start_callback(self._began)
        handler.register_end_callback(self._ended)

    def forget(self) -> None:
        """Watch no more."""
        handler, self._handler = self._handler, None
        if handler is not None:
            with contextlib.suppress(ValueError):  # torch.compiler.reset() may have cleared them
                handler.remove_start_callback(self._began)
                handler.remove_end_callback(self._ended)

    def _began(self, *_: Any) -> None:
        if not self._open:
            self._open = True
            self._tell()
            self._link.push("compile", Phase.COMPILE, LEARNED)

    def _ended(self, *_: Any) -> None:
        if self._open:
            self._open = False
            self._link.pop()
