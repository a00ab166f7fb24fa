"""First come, first served; and priority with ageing, under which no sequence waits for ever.

A waiting sequence gains one step of priority every `ageing_s`. All gain at the same rate, so their order never changes
and is known on arrival: by priority - in_line_since / ageing_s. A sequence of priority p is therefore passed only by
sequences of a higher priority q that arrive less than (q - p) * ageing_s after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from ..core.sequence import Sequence
from .policy import SortedPolicy


class Fcfs(SortedPolicy):
    """Order sequences by arrival alone. A preempted sequence returns to the place of its arrival."""

    def add(self, seq: Sequence) -> None:
        self._queue.add(seq, -seq.request.in_line_since)

    def rank(self, seq: Sequence) -> float:
        return 0.0


class Priority(SortedPolicy):
    """Order sequences by aged priority. One displaces another if its priority is higher both as given and with age."""

    def add(self, seq: Sequence) -> None:
        self._queue.add(seq, aged_priority(seq, self._settings.ageing_s))

    def in_line(self) -> Iterator[Sequence]:
        standing = self._queue.first.request.priority
        return takewhile(lambda seq: seq.request.priority == standing, self._queue)

    def rank(self, seq: Sequence) -> float:
        return seq.request.priority

    def outranked(self, seq: Sequence, running: list[Sequence]) -> list[Sequence]:
        # Without the first condition an older sequence would displace a younger one of the same priority. Without the
        # second, a sequence that started because of its age would lose its place.
        ageing_s = self._settings.ageing_s
        priority, aged = seq.request.priority, aged_priority(seq, ageing_s)
        lower = [other for other in running if other.request.priority < priority]
        return [other for other in lower if aged_priority(other, ageing_s) < aged]


def aged_priority(seq: Sequence, ageing_s: float) -> float:
    """Return the priority with age, less a term that is the same for all sequences at any moment."""
    return seq.request.priority - seq.request.in_line_since / ageing_s
