"""What leaves a run for others while it goes on: figures for Prometheus and notifications, fed from its events.

Off unless asked for.  Nothing here is waited for but at the very end, for a few seconds, and nothing that fails here is more
than a line in the run's log.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_resilience.config import ObserveConfig
from slurm_resilience.errors import ConfigError, ResilienceError
from slurm_resilience.observe import notify
from slurm_resilience.observe.events import read_for_standing
from slurm_resilience.observe.notify import Notifier
from slurm_resilience.observe.run_metrics import RunMetrics

_WRITE_EVERY_S = 5.0
_LEAVE_S = 5.0


def check(config: ObserveConfig) -> None:
    """Refuse before the start what could never work.  Raises :class:`ConfigError`."""
    notify.check(config.notify)
    if config.metrics_file is not None:
        path = Path(config.metrics_file)
        if path.suffix != ".prom":
            raise ConfigError(
                f"observe.metrics_file: {path} would not be collected",
                evidence="node-exporter's textfile collector reads *.prom only",
                remedy=f"name it {path.name}.prom",
            )
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(
                f"observe.metrics_file: {path.parent} is no folder that you may write into",
                remedy="give a file in a folder that exists on the batch host",
            )


class Telemetry(threading.Thread):
    """Takes events with ``take``, which returns at once; ``say`` gets lines for the run's log."""

    def __init__(self, run_dir: Path, run_id: str, job_id: str, config: ObserveConfig, say: Callable[[str], None]) -> None:
        super().__init__(name="telemetry", daemon=True)
        self._run_dir, self._config, self._say = run_dir, config, say
        self._metrics = RunMetrics(run_id) if config.metrics_port is not None or config.metrics_file else None
        about = {"run_id": run_id, "run_dir": str(run_dir), "job_id": job_id}
        notifies = config.notify.command or config.notify.webhook_file
        self._notifier = Notifier(config.notify, about, say) if notifies else None
        self._todo: queue.SimpleQueue[Mapping[str, Any] | threading.Event] = queue.SimpleQueue()
        self._written_at = float("-inf")
        self._complained = False

    def take(self, event: Mapping[str, Any]) -> None:
        """One more event, in order."""
        self._todo.put(event)

    def leave(self) -> None:
        """Write and tell what is left, for at most some seconds."""
        done = threading.Event()
        self._todo.put(done)
        done.wait(_LEAVE_S)
        if self._notifier is not None and not self._notifier.flush(within_s=_LEAVE_S):
            self._say("the last notifications were not given: they took too long")

    def run(self) -> None:
        try:
            seen = self._before()
            self._serve()
            while True:
                try:
                    event = self._todo.get(timeout=_WRITE_EVERY_S)
                except queue.Empty:
                    self._write()
                    continue
                if isinstance(event, threading.Event):
                    self._write(now=True)
                    event.set()
                    continue
                if int(event.get("seq") or 0) <= seen:
                    continue
                if self._metrics is not None:
                    self._metrics.apply(event)
                if self._notifier is not None:
                    self._notifier.take(event)
                self._write()
        except Exception as error:  # noqa: BLE001, the run must not suffer from a fault of ours here
            self._say(f"metrics and notifications have stopped: {type(error).__name__}: {error}; the run goes on")

    def _before(self) -> int:
        """What this run did in earlier allocations, of which nobody is told again; the last number."""
        seen, first = 0, self._todo.get()
        until = int(first.get("seq") or 0) if not isinstance(first, threading.Event) else 0
        try:
            for event in read_for_standing(self._run_dir):
                if until and int(event.get("seq") or 0) >= until:
                    break
                seen = int(event.get("seq") or 0)
                if self._metrics is not None:
                    self._metrics.apply(event)
                if self._notifier is not None:
                    self._notifier.catch_up(event)
        except (OSError, ResilienceError) as error:
            self._say(f"metrics begin anew, since earlier events cannot be read: {error}")
        if self._notifier is not None:
            self._notifier.start()
        if isinstance(first, threading.Event):
            first.set()
        else:
            if self._metrics is not None:
                self._metrics.apply(first)
            if self._notifier is not None:
                self._notifier.take(first)
            seen = max(seen, until)
        return seen

    def _serve(self) -> None:
        if self._metrics is None or self._config.metrics_port is None:
            return
        from prometheus_client import start_http_server

        host, port = self._config.metrics_host, self._config.metrics_port
        try:
            server, _ = start_http_server(port, addr=host, registry=self._metrics.registry())
        except OSError as error:
            self._say(f"no metrics at {host}:{port}: {error}; the run goes on without")
            return
        self._say(f"metrics: http://{host}:{server.server_address[1]}/metrics")

    def _write(self, *, now: bool = False) -> None:
        if self._metrics is None or not self._config.metrics_file:
            return
        if not now and time.monotonic() - self._written_at < _WRITE_EVERY_S:
            return
        from prometheus_client import write_to_textfile

        self._written_at = time.monotonic()
        try:
            write_to_textfile(self._config.metrics_file, self._metrics.registry())
            self._complained = False
        except OSError as error:
            if not self._complained:
                self._say(f"metrics cannot be written: {error}; the run goes on, and it is tried again")
            self._complained = True
