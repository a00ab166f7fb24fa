"""What a policy is: the waiting sequences in an order, and which running sequence ranks lowest."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ..core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """
    clock           seconds, monotonic
    likely_time_s   how long a waiting sequence's next token will likely take once the sequence starts
    ageing_s        seconds of waiting that are worth one step of priority
    tenant_weights  tenants' shares; a tenant that is not named has 1
    """

    clock: Callable[[], float]
    likely_time_s: Callable[[Sequence], float] = lambda seq: 0.0
    ageing_s: float = 60.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


class Policy(ABC):
    """Holds the waiting sequences and says which of them is next.

    Iterating yields every waiting sequence, the next in line first where that costs nothing.
    """

    @abstractmethod
    def __init__(self, settings: PolicySettings) -> None: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]: ...

    @abstractmethod
    def add(self, seq: Sequence) -> None:
        """Queue a sequence that has arrived or has been preempted."""

    @abstractmethod
    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of the queue; do nothing if it is not there."""

    @abstractmethod
    def in_line(self) -> Iterator[Sequence]:
        """Yield the next sequence, then those of equal standing behind it. Call this only if a sequence waits."""

    @abstractmethod
    def rank(self, seq: Sequence) -> float:
        """Rank a running sequence: the lowest is preempted first, the highest computes its prompt first."""

    def started(self, seq: Sequence) -> None:  # noqa: B027 - a hook that most policies leave empty
        """Note that a sequence, already removed, starts or resumes with `num_computed` tokens in the cache."""

    def token_served(self, seq: Sequence) -> None:  # noqa: B027 - likewise
        """Note one more output token."""

    def outranked(self, seq: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Return the running sequences that must give way to `seq`, even at the sequence limit.

        The answer for two sequences never changes while both live. Otherwise they could displace each other in turns.
        """
        return []


class SortedPolicy(Policy):
    """A policy whose whole queue is one SortedQueue; a subclass defines `add`, `rank` and perhaps `in_line`."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._queue = SortedQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)

    def in_line(self) -> Iterator[Sequence]:
        return iter(self._queue)


class SortedQueue:
    """Sequences by the rank that they were added with, highest first; equals in order of arrival (of their ids).

    The next in line is the last element of a sorted list, so a queue of 10,000 costs a step nothing.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, float, Sequence]] = []  # (rank, -id, sequence): sequences are never compared
        self._ranks: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in reversed(self._entries))

    def add(self, seq: Sequence, rank: float) -> None:
        self._ranks[seq.id] = rank
        insort(self._entries, (rank, -seq.id, seq))

    def remove(self, seq: Sequence) -> bool:
        """Remove a sequence; return whether it was in the queue."""
        rank = self._ranks.pop(seq.id, None)
        if rank is None:
            return False
        del self._entries[bisect_left(self._entries, (rank, -seq.id))]  # a prefix sorts before the whole entry
        return True

    @property
    def first(self) -> Sequence:
        return self._entries[-1][2]

    def num_above(self, rank: float) -> int:
        """Count the sequences of a higher rank."""
        return len(self._entries) - bisect_right(self._entries, (rank, math.inf))

    def behind(self, count: int) -> Iterator[Sequence]:
        """Yield all but the first `count` sequences."""
        entries = self._entries
        return (entries[index][2] for index in range(len(entries) - 1 - count, -1, -1))
