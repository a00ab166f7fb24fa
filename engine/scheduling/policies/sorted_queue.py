"""A list in order, whose last is the next in line: 10,000 entries cost a step nothing. Standard library only."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from pagoda_server.engine.core.sequence import Sequence


class SortedQueue:
    """Sequences by the rank that they were added with, highest first; equals in order of arrival (of their ids)."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, float, Sequence]] = []  # (rank, -id, sequence): no two compare further
        self._ranks: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in reversed(self._entries))

    def add(self, seq: Sequence, rank: float) -> None:
        self._ranks[seq.id] = rank
        insort(self._entries, (rank, -seq.id, seq))

    def remove(self, seq: Sequence) -> bool:
        """Whether it was in the queue."""
        rank = self._ranks.pop(seq.id, None)
        if rank is None:
            return False
        del self._entries[bisect_left(self._entries, (rank, -seq.id))]  # which is less than (rank, -seq.id, seq)
        return True

    @property
    def first(self) -> Sequence:
        return self._entries[-1][2]

    def num_above(self, rank: float) -> int:
        """How many are of a higher rank."""
        return len(self._entries) - bisect_right(self._entries, (rank, math.inf))

    def behind(self, count: int) -> Iterator[Sequence]:
        """All but the first so many."""
        entries = self._entries
        return (entries[at][2] for at in range(len(entries) - 1 - count, -1, -1))
