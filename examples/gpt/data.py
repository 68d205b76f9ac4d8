"""Real text that is on every machine: the source files of Python's standard library, as bytes.

The same files in the same order give the same samples; their fingerprint goes into the checkpoint, so that a run does not go on
with other data (another Python version, for one) without a word.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

MOST_BYTES = 4 << 20
VALIDATION_EVERY = 16  # every so many-th sample is kept for validation


@dataclass(frozen=True)
class Text:
    """One long row of bytes, cut into samples of ``context`` + 1 bytes; the last byte of one is the first target only."""

    tokens: torch.Tensor
    context: int
    fingerprint: str

    @property
    def _samples(self) -> int:
        return (len(self.tokens) - 1) // self.context

    @property
    def num_train(self) -> int:
        return self._samples - self.num_validation

    @property
    def num_validation(self) -> int:
        return self._samples // VALIDATION_EVERY

    def train(self, indices: tuple[int, ...] | list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of some training samples, each of shape (samples, context)."""
        return self._cut(
            [index // (VALIDATION_EVERY - 1) * VALIDATION_EVERY + index % (VALIDATION_EVERY - 1) for index in indices]
        )

    def validation(self, indices: tuple[int, ...] | list[int] | range) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of some validation samples."""
        return self._cut([index * VALIDATION_EVERY + VALIDATION_EVERY - 1 for index in indices])

    def _cut(self, samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.stack([self.tokens[at * self.context : (at + 1) * self.context + 1] for at in samples]).long()
        return rows[:, :-1], rows[:, 1:]


def standard_library(context: int, most_bytes: int = MOST_BYTES) -> Text:
    """The standard library's own modules, by sorted path, up to ``most_bytes``."""
    root = Path(sysconfig.get_paths()["stdlib"])
    raw = bytearray()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts or path.name.startswith("_sysconfigdata"):
            continue
        raw += path.read_bytes()
        if len(raw) >= most_bytes:
            break
    del raw[most_bytes:]
    fingerprint = hashlib.sha256(raw).hexdigest()[:16]
    return Text(torch.frombuffer(raw, dtype=torch.uint8), context, fingerprint)
