"""Which launcher forks the next ranks?  Starts, renews, retires and gives up launchers; ranks can always start cold."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_resilience.runtime.launcher_link import LauncherLink
from slurm_resilience.runtime.loop import Loop
from slurm_resilience.runtime.processes import is_alive, look

_MOST_DEATHS = 3
_LEARNED_S = 60.0  # a learned module that takes longer to import is given up; one that the user named is not
_RETRY_S = 0.5


class Launchers:
    """The node's launchers: one current, perhaps its successor, and retired ones that still have ranks to bury.

    ``heard(link, message)`` gets what concerns ranks and stores; ``lost(link)`` is called when one is gone; ``changed()``
    when :attr:`warm` may have changed.  With ``command`` None there is never a launcher, and ``reason`` says why.
    """

    def __init__(
        self, loop: Loop, command: Sequence[str] | None, *,
        named: Sequence[str], learned: Sequence[str], environment: Mapping[str, str], log: Path, agent: int, reason: str,
        heard: Callable[[LauncherLink, dict[str, Any]], None], lost: Callable[[LauncherLink], None],
        changed: Callable[[], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._command = command
        self._named = list(named)
        self._learned = list(learned)
        self._environment = dict(environment)
        self._log = log
        self._agent = agent
        self._heard, self._lost, self._changed, self._say = heard, lost, changed, say
        self._off = reason
        self._deaths = 0
        self._retry_at = 0.0
        self._started_at = 0.0
        self._shunned: set[str] = set()
        self.current: LauncherLink | None = None
        self._next: LauncherLink | None = None
        self._retired: list[LauncherLink] = []

    @property
    def warm(self) -> bool | None:
        """True: can fork; False: cannot, start cold; None: wait for it."""
        if self._command is None:
            return False
        return self.current.warm if self.current is not None else None

    @property
    def reason(self) -> str:
        """Why :attr:`warm` is not True."""
        if self._command is None:
            return self._off
        return self.current.reason if self.current is not None else "the launcher died and is being started again"

    @property
    def seconds(self) -> float:
        """What the current launcher's preload took."""
        return self.current.seconds if self.current is not None else 0.0

    @property
    def learned(self) -> list[str]:
        """Modules that launchers preload besides those that the user named."""
        return list(self._learned)

    def links(self) -> list[LauncherLink]:
        """All launchers that are there."""
        return [link for link in (self.current, self._next, *self._retired) if link is not None]

    def processes(self) -> set[int]:
        """Their process numbers: these are not to be killed with an attempt."""
        return {pid for link in self.links() for pid in link.pids}

    def pending(self) -> bool:
        """Whether some fork was asked for and is neither done nor refused yet."""
        return any(link.pending for link in self.links())

    def tick(self, now: float) -> None:
        """Start the launcher when there is none; give up learned modules that take too long."""
        if self._command is None:
            return
        if self.current is None and now >= self._retry_at:
            link = LauncherLink.start(self._command, environment=self._environment, log=self._log, agent=self._agent)
            self._started_at = now
            self.current = link
            self._loop.watch(link, lambda: self._hear(link))
            link.preload(self._named, [name for name in self._learned if name not in self._shunned])
        elif self.current is not None and self.current.warm is None and self._learned and now > self._started_at + _LEARNED_S:
            self._say("the learned modules took too long to import; starting again without them")
            self._learned = []
            self._part(self.current)

    def renew(self, learned: Sequence[str]) -> bool:
        """Prepare a successor that has these modules, too, for the next attempt; False when there is nothing to do."""
        current = self.current
        if current is None or not current.warm or self._next is not None:
            return False
        new = [name for name in learned if name not in current.known and name not in self._shunned]
        if not new:
            return False
        self._learned = [*dict.fromkeys([*self._learned, *new])]
        link = current.renew(self._named, new, agent=self._agent)
        if link is None:
            return False
        self._next = link
        self._loop.watch(link, lambda: self._hear(link))
        return True

    def drop_stuck(self) -> None:
        """Part with launchers that do not answer."""
        for link in self.links():
            if link.pending:
                self._say("a launcher does not answer; starting another")
                self._part(link)

    def close(self) -> None:
        """Let all of them go."""
        for link in self.links():
            self._loop.forget(link)
            link.close()
        self.current = self._next = None
        self._retired = []
        self._command, self._off = None, "the agent is ending"

    # ------------------------------------------------------------------------------------------------------------------

    def _hear(self, link: LauncherLink) -> None:
        messages, gone = link.receive()
        for message in messages:
            kind = message["m"]
            if kind == "pid":
                if self._is_elsewhere(link, message["pid"]):
                    self._command, self._off = None, "the launcher is in a PID namespace of its own, where we cannot kill ranks"
                    gone = True
                    break
                link.pids.add(message["pid"])
            elif kind == "warm":
                self._warmed(link, message)
            else:
                self._heard(link, message)
        if gone or (link in self._retired and not link.children and not link.pending):
            self._part(link)

    def _is_elsewhere(self, link: LauncherLink, pid: int) -> bool:
        """Whether the number that it has for itself is not its number here."""
        found = look(pid)
        if found is None:  # it may also have ended already
            return any((process := look(known)) is not None and is_alive(process) for known in link.pids)
        while found is not None and found.pid != self._agent:
            found = look(found.parent)
        return found is None

    def _warmed(self, link: LauncherLink, message: dict[str, Any]) -> None:
        link.warm, link.reason, link.seconds = message["warm"], message["reason"], message["seconds"]
        for skipped in message["skipped"]:
            self._say(f"not preloaded: {skipped}")
        if message["culprit"]:
            self._shunned.add(message["culprit"])
            self._say(f"will not preload {message['culprit']} again: {message['reason']}")
            self._part(link)
            return
        if link is self._next:
            if not link.warm:
                self._part(link)
                return
            self._next = None
            if self.current is not None:
                self._retired.append(self.current)
            self.current = link
            self._say(f"a launcher with {len(link.known)} preloads took over after {link.seconds:.1f} s")
            for old in [old for old in self._retired if not old.children and not old.pending]:
                self._part(old)
        else:
            self._say(f"the launcher is warm after {link.seconds:.1f} s" if link.warm else f"cold starts only: {link.reason}")
        self._deaths = 0
        self._changed()

    def _part(self, link: LauncherLink) -> None:
        """Hang up on a launcher, dead or alive; it and what it forked are gone with that."""
        self._loop.forget(link)
        link.close()
        was_current = link is self.current
        if link in self._retired:
            self._retired.remove(link)
        elif link is self._next:
            self._next = None
        elif was_current:
            self.current = None
            self._retry_at = time.monotonic()
            if link.warm is None:
                self._deaths += 1
                self._retry_at += _RETRY_S
                self._learned = []  # one of them may have brought it down
            if self._deaths >= _MOST_DEATHS:
                self._command = None
                self._off = f"the launcher died {self._deaths} times before it was warm; see {self._log}"
        self._lost(link)
        if was_current:
            self._changed()
