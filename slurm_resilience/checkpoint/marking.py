"""What is found out about checkpoints after their commit: put into their directories first, then into the index."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from slurm_resilience.checkpoint import marks
from slurm_resilience.checkpoint.entry import Entry, State
from slurm_resilience.checkpoint.root import OpenRoot
from slurm_resilience.errors import CheckpointError

MOST_REASON_CHARS = 1000


class MarkedRoot(OpenRoot):
    """A root whose checkpoints can be marked as attempted, verified, quarantined and pinned."""

    def mark_attempted(self, entry: Entry) -> Entry:
        """Say, before it is loaded, that a load begins: if that kills the job, the next attempt prefers another entry."""
        mark = self._loads_of(entry)
        mark["begun"] = [*mark["begun"], self._attempt()]
        return self._mark(entry, marks.ATTEMPTED, mark, attempts=len(marks.blamed(mark)))

    def excuse(self, attempts: Collection[int]) -> None:
        """Take it off the newest entries that these attempts ended while they loaded: something else had ended them.

        Believed MOST_EXCUSES times an entry; see :func:`marks.blamed`.  Looks at the head's entries only.
        """
        for known in self.index.lookup() or ():
            entry = self.index.current(known)
            if entry is None or not entry.attempts:
                continue
            mark = self._loads_of(entry)
            mark["excused"] = sorted({*mark["excused"], *(a for a in mark["begun"] if a in attempts)})
            left = len(marks.blamed(mark))
            if left < entry.attempts:
                self._mark(entry, marks.ATTEMPTED, mark, attempts=left)

    def _loads_of(self, entry: Entry) -> dict[str, list[int]]:
        """Which attempts began to load this entry since it was last verified, and which of them are excused."""
        mark = marks.get(self.path(entry), marks.ATTEMPTED) or {}
        known = {key: mark.get(key) for key in ("begun", "excused")}
        return {
            key: [one for one in value if isinstance(one, int)] if isinstance(value, list) else []
            for key, value in known.items()
        }

    def mark_verified(self, entry: Entry, by: str) -> Entry:
        """Say that a run trains on from this entry and that all checks of the resume held."""
        for mark in (marks.ATTEMPTED, marks.DOUBTED):
            marks.drop(self._bench, self.path(entry), mark)
        return self._mark(entry, marks.VERIFIED, {"by": by}, state=State.VERIFIED, by=by, attempts=0)

    def quarantine(self, entry: Entry, reason: str, by: str) -> Entry:
        """Never resume from this entry again; it is kept, with the reason, until it is released or pruned.

        Of a reason that fills pages, the first thousand characters are kept.
        """
        reason = reason if len(reason) <= MOST_REASON_CHARS else f"{reason[:MOST_REASON_CHARS]}…"
        about = {"reason": reason, "by": by}
        return self._mark(entry, marks.QUARANTINED, about, state=State.QUARANTINED, reason=reason, by=by)

    def release(self, entry: Entry, *, doubt: str = "") -> Entry:
        """Take a quarantine back, with the marks of earlier loads.

        ``doubt`` says what is wrong with it all the same: until a resume has verified it, retention does not count on it.
        """
        if doubt:
            about = {"reason": doubt[:MOST_REASON_CHARS], "at": round(self._clock.time(), 3)}
            marks.put(self._bench, self.path(entry), marks.DOUBTED, about)
        for mark in (marks.QUARANTINED, marks.ATTEMPTED, *(() if doubt else (marks.DOUBTED,))):
            marks.drop(self._bench, self.path(entry), mark)
        return self._refresh(entry.name, "release")

    def pin(self, entry: Entry, *, pinned: bool = True) -> Entry:
        """Keep this entry whatever retention says, or stop keeping it."""
        if pinned:
            return self._mark(entry, marks.PINNED, {}, pinned=True)
        marks.drop(self._bench, self.path(entry), marks.PINNED)
        return self._refresh(entry.name, "unpin")

    def _mark(self, entry: Entry, mark: str, about: dict[str, Any], **changes: Any) -> Entry:
        self.check_owner()
        about = {**about, "attempt": self.attempt, "at": round(self._clock.time(), 3), **self.about}
        marks.put(self._bench, self.path(entry), mark, about)
        return self._refresh(entry.name, mark.strip(".").removesuffix(".json"), **{k: str(v) for k, v in changes.items()})

    def _refresh(self, name: str, op: str, **fields: Any) -> Entry:
        """Bring the head up to date after a mark has changed."""
        self.check_owner()
        current = self.index.entry(name)
        if current is None:
            raise CheckpointError(f"Checkpoint {name} is gone", evidence=f"{self.root / name} does not exist")
        with self._lock.held():
            head = self.index.lookup()
            if head is None or op == "release" or not any(other.usable and other.name != name for other in head):
                self.index.rebuild()
            elif any(entry.name == name for entry in head):
                self.index.publish([current if entry.name == name else entry for entry in head])
                self.index.withdraw()
            self.index.append(op, self._clock.time(), name=name, attempt=self.attempt, **fields)
        return current
