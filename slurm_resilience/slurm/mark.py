"""What we write into a job's comment, beside the words of its user: the one place of a job that outlives all its runs.

resilient                                              a plain word: whoever looks at the queue may speed this job up
[slurm-resilience requeue RUN at 1700000000]           somebody of ours holds it at this moment, to change it
[slurm-resilience excluded n1,n2 at 1700000000]        these exclusions are ours, not the user's; they expire
[slurm-resilience freed 2]                             released so often after failed launches
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace

from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm.nodeset import expand, fold

WORD = "resilient"
# Who holds a job for `slurm-resilience requeue`.
BY_HAND = "by-hand"
_ANY = re.compile(
    r" ?\[slurm-resilience (?:requeue (?P<holder>\S+) at (?P<held_at>\d+)"
    r"|excluded (?P<excluded>\S+) at (?P<excluded_at>\d+)|freed (?P<freed>\d+))\]"
)


@dataclass(frozen=True)
class Marks:
    """A comment, taken apart.  ``words`` are the user's own.  Times are wall-clock seconds."""

    words: str
    holder: str = ""
    held_at: float | None = None
    excluded: tuple[str, ...] = ()
    excluded_at: float | None = None
    freed: int = 0

    @property
    def ours(self) -> bool:
        """The job asked to be kept alive by us."""
        return any(word.startswith(WORD) for word in self.words.split()) or self != Marks(self.words)

    @classmethod
    def read(cls, comment: str) -> Marks:
        """From a job's comment; anything that is not ours stays among the words."""
        marks = cls(_ANY.sub("", comment).strip())
        for found in _ANY.finditer(comment):
            if found["holder"]:
                marks = replace(marks, holder=found["holder"], held_at=float(found["held_at"]))
            elif found["excluded"]:
                with contextlib.suppress(SlurmError):  # somebody's hand was in it
                    marks = replace(marks, excluded=expand(found["excluded"]), excluded_at=float(found["excluded_at"]))
            else:
                marks = replace(marks, freed=int(found["freed"]))
        return marks

    def held_by(self, holder: str, at: float) -> Marks:
        """The same with the mark of somebody who is about to hold the job."""
        return replace(self, holder=re.sub(r"[\s\]]", "-", holder) or "-", held_at=float(round(at)))

    def let_go(self) -> Marks:
        """The same without that mark."""
        return replace(self, holder="", held_at=None)

    def __str__(self) -> str:
        out = [self.words] if self.words else []
        if self.held_at is not None:
            out.append(f"[slurm-resilience requeue {self.holder} at {self.held_at:.0f}]")
        if self.excluded:
            out.append(f"[slurm-resilience excluded {fold(self.excluded)} at {self.excluded_at or 0:.0f}]")
        if self.freed:
            out.append(f"[slurm-resilience freed {self.freed}]")
        return " ".join(out)


def with_word(comment: str) -> str:
    """The user's comment with our word behind it, once."""
    return comment if WORD in comment.split() else f"{comment} {WORD}".strip()
