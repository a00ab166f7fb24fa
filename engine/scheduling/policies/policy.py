"""What the scheduler asks of a policy. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pagoda_server.engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """
    ageing_s        seconds of waiting that are worth one step of priority
    tenant_weights  shares of tenants, 1 where not named
    clock           seconds, monotonic
    likely_time_s   of a sequence: what its next token will likely take once it starts
    """

    clock: Callable[[], float]
    likely_time_s: Callable[[Sequence], float] = lambda seq: 0.0
    ageing_s: float = 60.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """Holds the sequences that wait. Iterates over them, the next in line first where that costs nothing."""

    def __init__(self, settings: PolicySettings) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def add(self, seq: Sequence) -> None:
        """It waits: it has arrived, or has given up its blocks."""

    def remove(self, seq: Sequence) -> None:
        """It waits no more, if it did."""

    def in_line(self) -> Iterator[Sequence]:
        """The next in line, then those of the same standing behind it. At least one waits."""

    def started(self, seq: Sequence) -> None:
        """It has been removed because it starts, or starts again after a preemption, from `num_computed` tokens."""

    def token_served(self, seq: Sequence) -> None:
        """One more token of its output exists."""

    def rank(self, seq: Sequence) -> float:
        """Of a sequence that runs: the lowest gives up its blocks first, the highest computes its prompt first."""

    def outranked(self, seq: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Those of the running that have to give way to it, even at the sequence limit.

        Once and for all: of two sequences, the same one gives way whenever they meet.
        """
