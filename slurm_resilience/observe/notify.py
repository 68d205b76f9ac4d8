"""Tells somebody outside what happens: runs a command, or posts to an address, for the events that the user chose.

Never in the way: a thread of its own, a bound on what waits, on how long a try takes and on how often something is told.  What
fails is said in the run's log and changes nothing else.
"""

from __future__ import annotations

import os
import queue
import shlex
import stat
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_resilience.config import NotifyConfig
from slurm_resilience.errors import ConfigError, nearest
from slurm_resilience.observe.json_text import dumps
from slurm_resilience.observe.narrator import Narrator
from slurm_resilience.observe.vocabulary import EVENTS

RECOVERED = "recovered"
VERSION = 1
_MOST_WAITING = 256
_SAY_EVERY_S = 60.0
# What may be long, or the user's own business.
_KEPT_BACK = frozenset({"v", "seq", "traceback", "argv", "plan", "pids"})


def check(config: NotifyConfig) -> None:
    """Refuse what could never work.  Raises :class:`ConfigError` for an event that does not exist, or a file that tells all."""
    for name in config.events:
        if name != RECOVERED and name not in EVENTS:
            raise ConfigError(f"observe.notify.events: there is no event {name!r}", remedy=nearest(name, [*EVENTS, RECOVERED]))
    if config.command and not shlex.split(config.command):
        raise ConfigError("observe.notify.command is empty", remedy="leave it out, or give a command")
    if config.webhook_file is not None:
        address(Path(config.webhook_file))


def address(path: Path) -> tuple[str, dict[str, str]]:
    """The URL in the first line of a file, and headers in those that follow (``Authorization: Bearer …``).

    Raises :class:`ConfigError` when it cannot be read, or when others can read it: it may hold a secret.
    """
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(
                f"{path} can be read by others, and may hold a secret",
                evidence=f"its mode is {stat.S_IMODE(path.stat().st_mode):04o}",
                remedy=f"chmod 600 {path}",
            )
        url, *rest = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"observe.notify.webhook_file: {path} cannot be read", evidence=str(error)) from error
    except ValueError:
        raise ConfigError(f"observe.notify.webhook_file: {path} is empty", remedy="put the URL into its first line") from None
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"observe.notify.webhook_file: the first line of {path} is no http(s) URL")
    headers = dict(line.partition(":")[::2] for line in rest)
    return url, {name.strip(): value.strip() for name, value in headers.items()}


class _StayThere(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: what authorises us here is not for another address."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Notifier(threading.Thread):
    """Takes events from one thread, and tells of those that were chosen in its own; ``say`` gets a line where that fails."""

    def __init__(self, config: NotifyConfig, about: Mapping[str, Any], say: Callable[[str], None]) -> None:
        super().__init__(name="notifier", daemon=True)
        self._config, self._about, self._say = config, dict(about), say
        self._todo: queue.Queue[dict[str, Any] | threading.Event] = queue.Queue(_MOST_WAITING)
        self._narrator = Narrator(every_s=0.0)
        self._told_at: dict[str, float] = {}
        self._held_back: dict[str, int] = {}
        self._lost = 0
        self._said_at = float("-inf")

    def catch_up(self, event: Mapping[str, Any]) -> None:
        """Take an event into account that somebody was told of earlier."""
        self._narrator.catch_up([event])

    def take(self, event: Mapping[str, Any]) -> None:
        """One more event.  Returns at once; when too many messages wait, this one is lost, and the next one says so."""
        lines = self._narrator.lines(event)
        name = str(event["event"])
        recovered = next((line for line in lines if "recovered from " in line), None) if name == "first_step" else None
        if recovered is not None and RECOVERED in self._config.events:
            self._tell(RECOVERED, event, recovered)
        if name in self._config.events:
            self._tell(name, event, lines[0] if lines else name)

    def flush(self, *, within_s: float) -> bool:
        """Wait until all that was taken has been told; False when that took too long."""
        done = threading.Event()
        try:
            self._todo.put(done, timeout=within_s)
        except queue.Full:
            return False
        return done.wait(within_s)

    def run(self) -> None:
        while True:
            message = self._todo.get()
            if isinstance(message, threading.Event):
                message.set()
                continue
            try:
                if self._config.command:
                    self._run(shlex.split(self._config.command), message)
                if self._config.webhook_file:
                    self._post(message)
            except Exception as error:  # noqa: BLE001, a fault of ours here must not stop later messages
                self._failed(f"{type(error).__name__}: {error}")

    def _tell(self, name: str, event: Mapping[str, Any], line: str) -> None:
        now = time.monotonic()
        if now - self._told_at.get(name, float("-inf")) < self._config.every_s:
            self._held_back[name] = self._held_back.get(name, 0) + 1
            return
        self._told_at[name] = now
        text = line.partition("  ")[2] or line
        message = {
            "v": VERSION,
            **self._about,
            "event": name,
            "t": event["t"],
            "text": text,
            "held_back": self._held_back.pop(name, 0),
            "lost": self._lost,
            "fields": {key: value for key, value in event.items() if key not in _KEPT_BACK},
        }
        try:
            self._todo.put_nowait(message)
        except queue.Full:
            self._lost += 1

    def _run(self, argv: list[str], message: Mapping[str, Any]) -> None:
        """The message on stdin; what it prints goes nowhere."""
        environment = {**os.environ, "RESILIENCE_EVENT": str(message["event"]), "RESILIENCE_TEXT": str(message["text"])[:1000]}
        try:
            child = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._failed(f"{argv[0]}: {error}")
            return
        try:
            child.communicate(dumps(message).encode(), timeout=self._config.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            self._failed(f"{argv[0]} took more than {self._config.timeout_s:g} s and was killed")
            return
        if child.returncode != 0:
            self._failed(f"{argv[0]} ended with {child.returncode}")

    def _post(self, message: Mapping[str, Any]) -> None:
        """JSON by POST.  Neither the address nor the headers are ever shown."""
        try:
            url, headers = address(Path(str(self._config.webhook_file)))
            body = dumps(message).encode()
            asked = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers}, method="POST")  # noqa: S310
            with urllib.request.build_opener(_StayThere).open(asked, timeout=self._config.timeout_s):
                pass
        except urllib.error.HTTPError as error:
            self._failed(f"the webhook answered {error.code}")
        except (OSError, ValueError) as error:
            self._failed(f"the webhook: {type(error).__name__}: {getattr(error, 'reason', '')}".rstrip(": "))
        except ConfigError as error:
            self._failed(str(error))

    def _failed(self, why: str) -> None:
        now = time.monotonic()
        if now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            self._say(f"a notification could not be given: {why}; the run goes on")
