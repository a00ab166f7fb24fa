"""Priority with ageing: higher first, and nobody waits without end. Standard library only.

A sequence that waits gains one step of priority every `ageing_s`. All gain at the same rate, so their order never
changes and is known on arrival: by priority - arrived / ageing_s. A sequence of priority p is therefore passed only by
those of a higher priority q that arrive less than (q - p) * ageing_s after it, however many come.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.engine.scheduling.policies.policy import PolicySettings
from pagoda_server.engine.scheduling.policies.sorted_queue import SortedQueue


def aged_priority(seq: Sequence, ageing_s: float) -> float:
    """Up to what is the same for all at any moment."""
    return seq.priority - seq.in_line_since / ageing_s


class Priority:
    """A sequence makes another give way if its priority is higher both as given and with age."""

    def __init__(self, settings: PolicySettings) -> None:
        self._ageing_s = settings.ageing_s
        self._queue = SortedQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, seq: Sequence) -> None:
        self._queue.add(seq, aged_priority(seq, self._ageing_s))

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)

    def in_line(self) -> Iterator[Sequence]:
        standing = self._queue.first.priority
        return takewhile(lambda seq: seq.priority == standing, self._queue)

    def started(self, seq: Sequence) -> None: ...

    def token_served(self, seq: Sequence) -> None: ...

    def rank(self, seq: Sequence) -> float:
        return seq.priority

    def outranked(self, seq: Sequence, running: list[Sequence]) -> list[Sequence]:
        # Without the first condition an older equal would drive out a younger one; without the second, who has started
        # at last by its age would lose its place.
        priority, aged = seq.priority, aged_priority(seq, self._ageing_s)
        lower = [other for other in running if other.priority < priority]
        return [other for other in lower if aged_priority(other, self._ageing_s) < aged]
