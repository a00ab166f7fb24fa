"""First come, first served: priorities count for nothing, and nobody gives way. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.engine.scheduling.policies.policy import PolicySettings
from pagoda_server.engine.scheduling.policies.sorted_queue import SortedQueue


class Fcfs:
    """A preempted sequence goes back to the place of its arrival."""

    def __init__(self, settings: PolicySettings) -> None:
        self._queue = SortedQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, seq: Sequence) -> None:
        self._queue.add(seq, -seq.in_line_since)

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)

    def in_line(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def started(self, seq: Sequence) -> None: ...

    def token_served(self, seq: Sequence) -> None: ...

    def rank(self, seq: Sequence) -> float:
        return 0.0

    def outranked(self, seq: Sequence, running: list[Sequence]) -> list[Sequence]:
        return []
