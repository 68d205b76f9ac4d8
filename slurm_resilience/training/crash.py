"""An exception that ends the user's script is a fact with its type, message and step, before the process is gone."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from slurm_resilience.errors import ResilienceError

TRACEBACK_CHARS = 8000


class CrashReporter:
    """Sits in ``sys.excepthook`` and tells once; whoever sat there before is called after it."""

    def __init__(self, tell: Callable[..., Any]) -> None:
        self._tell = tell
        self._before: Any = None
        self._hook = self._uncaught

    def install(self) -> None:
        self._before = sys.excepthook
        sys.excepthook = self._hook

    def restore(self) -> None:
        """Put the hook of before back, unless somebody has taken our place since."""
        if self._before is not None and sys.excepthook is self._hook:
            sys.excepthook = self._before
        self._before = None

    def report(self, error: BaseException) -> None:
        """Tell of this exception, unless it was told already."""
        if getattr(error, "resilience_reported", False) or isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit)):
            return
        with contextlib.suppress(AttributeError):  # an exception class with slots
            error.resilience_reported = True  # type: ignore[attr-defined]  # the launcher looks at it too
        text = "".join(traceback.format_exception(error))
        code = int(error.exit_code) if isinstance(error, ResilienceError) else None
        self._tell(
            "exception",
            type=type(error).__qualname__,
            message=str(error)[:2000],
            traceback=text[-TRACEBACK_CHARS:],
            exit_code=code,
        )

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self.report(error)
        finally:
            (self._before or sys.__excepthook__)(kind, error, trace)
