"""What a run did when: spans without gaps, some of which turn out to have been in vain."""

from __future__ import annotations

from dataclasses import dataclass, field

QUEUED, DOWN, TRAINING, SAVING, LOST = "queued", "down", "training", "saving", "lost"


@dataclass
class Span:
    """Seconds on the clock, and what the run did."""

    start: float
    end: float
    kind: str


@dataclass
class Timeline:
    """Spans in order, each second in one of them."""

    spans: list[Span] = field(default_factory=list)

    def begin(self, at: float, kind: str) -> None:
        """From ``at`` on (not before the last span's start) the run does ``kind``."""
        if self.spans:
            last = self.spans[-1]
            last.end = max(last.start, at)
            at = last.end
            if last.kind == kind:
                return
        self.spans.append(Span(at, at, kind))

    @property
    def now(self) -> str:
        """What the run does at the end of what is known."""
        return self.spans[-1].kind

    def lose(self, since: float, until: float) -> float:
        """Training between ``since`` and ``until``, which lies between two attempts, is lost; the seconds of it."""
        return self.paint(since, until, LOST)

    def paint(self, since: float, until: float, kind: str) -> float:
        """What was taken for training between ``since`` and ``until`` turns out to have been ``kind``; the seconds of it."""
        at, out, painted = len(self.spans), [], 0.0
        while at and self.spans[at - 1].end > since:  # from the end, as runs have thousands of spans and repaint the newest
            at -= 1
        for span in self.spans[at:]:
            if span.kind == TRAINING and span.start < until:
                first, last = max(span.start, since), min(span.end, until)
                pieces = ((span.start, first, TRAINING), (first, last, kind), (last, span.end, TRAINING))
                out += [Span(*piece) for piece in pieces if piece[1] > piece[0]]
                painted += last - first
            else:
                out.append(span)
        self.spans[at:] = out
        return painted

    def total(self, kind: str) -> float:
        """Seconds spent on ``kind``."""
        return sum(span.end - span.start for span in self.spans if span.kind == kind)
