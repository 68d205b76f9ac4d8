"""Which sample stands at place ``i`` of a shuffled epoch?  Answered in constant time, without an array.

A keyed Feistel network permutes the numbers of ``b`` bits; numbers past the end are walked on until they fall
inside ("cycle walking", Black and Rogaway 2002), fewer than two steps on average.  It is for shuffling, not secrecy.
The mapping is part of the checkpoint format: a change of it needs a new ``VERSION``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

VERSION = 1
_ROUNDS = 8
_MASK64 = (1 << 64) - 1
_MIX_A = 0x9E3779B97F4A7C15  # odd constants of splitmix64
_MIX_B = 0xBF58476D1CE4E5B9
_MIN_BITS = 6  # tiny halves mix badly
_VECTOR_FROM = 256  # below this NumPy's start-up costs more than it saves


class Permutation:
    """A permutation of ``range(size)`` chosen by ``key``; the same on every machine and release."""

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} items")
        self.size = size
        bits = max((size - 1).bit_length(), _MIN_BITS)
        self._low_bits = bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        material = ",".join(map(str, (VERSION, size, *key))).encode()
        digest = hashlib.blake2b(material, digest_size=8 * _ROUNDS, person=b"sampleorder").digest()
        self._keys = struct.unpack(f"<{_ROUNDS}Q", digest)

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.size:
            raise IndexError(place)
        value = self._once(place)
        while value >= self.size:
            value = self._once(value)
        return value

    def many(self, places: Sequence[int]) -> list[int]:
        """The samples at several places; the same numbers as one by one, faster for many."""
        if len(places) < _VECTOR_FROM:
            return [self[place] for place in places]
        import numpy as np

        if min(places) < 0 or max(places) >= self.size:
            raise IndexError(f"places of {min(places)} to {max(places)} in {self.size}")
        values = self._once_many(np.asarray(places, dtype=np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._once_many(values[outside])
            outside = outside[values[outside] >= self.size]
        result: list[int] = values.tolist()
        return result

    def _once(self, value: int) -> int:
        low, high = value & self._low_mask, value >> self._low_bits
        for turn, key in enumerate(self._keys):
            if turn & 1:
                high ^= _mix(low, key) & self._high_mask
            else:
                low ^= _mix(high, key) & self._low_mask
        return high << self._low_bits | low

    def _once_many(self, values: Any) -> Any:
        """:meth:`_once` on an array of uint64, whose products wrap by themselves."""
        import numpy as np

        a, b, shift = np.uint64(_MIX_A), np.uint64(_MIX_B), np.uint64(32)
        low, high = values & np.uint64(self._low_mask), values >> np.uint64(self._low_bits)
        for turn, key in enumerate(self._keys):
            half = low if turn & 1 else high
            mixed = (half ^ np.uint64(key)) * a
            mixed = (mixed ^ (mixed >> shift)) * b
            mixed ^= mixed >> shift
            if turn & 1:
                high = high ^ (mixed & np.uint64(self._high_mask))
            else:
                low = low ^ (mixed & np.uint64(self._low_mask))
        return high << np.uint64(self._low_bits) | low


def _mix(value: int, key: int) -> int:
    value = ((value ^ key) * _MIX_A) & _MASK64
    value = ((value ^ (value >> 32)) * _MIX_B) & _MASK64
    return value ^ (value >> 32)
