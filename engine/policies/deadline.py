"""Goodput order: least slack first, and what can no longer meet its target behind what can. Standard library only.

Earliest deadline first is the best order as long as all can be met, and the worst under overload, when it spends itself
on those that are late already. A sequence's slack is the time until it must start to meet its target: that of the first
token, or of the next one if it has been preempted. Once that time is past, it is late, and counts for no goodput
whenever it runs; late ones wait in order of arrival and have one start of `LATE_EVERY` while others wait as well, so
that they do not wait without end: of two hundred late ones the last starts within 8 * 200 starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.policies.policy import PolicySettings
from engine.policies.sorted_queue import SortedQueue
from engine.sequence import Sequence

LATE_EVERY = 8
DEFAULT_TTFT_S = 10.0  # of a request that names no target
DEFAULT_TPOT_S = 1.0


class Deadline:
    """Priorities count for nothing: a target is what a request has instead."""

    def __init__(self, settings: PolicySettings) -> None:
        self._clock = settings.clock
        self._least_time_s = settings.least_time_s
        self._timely = SortedQueue()  # by the last moment to start, the earliest first
        self._late = SortedQueue()  # in order of arrival
        self._starts = 0

    def __len__(self) -> int:
        return len(self._timely) + len(self._late)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._timely
        yield from self._late

    def add(self, seq: Sequence) -> None:
        self._timely.add(seq, self._least_time_s(seq) - _due(seq))

    def remove(self, seq: Sequence) -> None:
        if not self._timely.remove(seq):
            self._late.remove(seq)

    def in_line(self) -> Iterator[Sequence]:
        now = self._clock()
        while self._timely and -self._timely.first_rank < now:
            seq = self._timely.first
            self._timely.remove(seq)
            self._late.add(seq, 0.0)
        is_turn_of_late = self._starts % LATE_EVERY == LATE_EVERY - 1
        return iter(self._late if self._late and (is_turn_of_late or not self._timely) else self._timely)

    def started(self, seq: Sequence) -> None:
        self._starts += 1

    def token_served(self, seq: Sequence) -> None: ...

    def rank(self, seq: Sequence) -> float:
        """Those that have missed their target for the first token lose nothing more by giving way."""
        first_token = self._clock() if seq.first_token is None else seq.first_token
        return float(first_token - seq.arrived <= _ttft_s(seq))

    def outranked(self, seq: Sequence, running: list[Sequence]) -> list[Sequence]:
        return []


def _ttft_s(seq: Sequence) -> float:
    return seq.ttft_s if seq.ttft_s < math.inf else DEFAULT_TTFT_S


def _due(seq: Sequence) -> float:
    """When its next token has to be there."""
    if seq.first_token is None:
        return seq.arrived + _ttft_s(seq)
    return seq.first_token + seq.output_len * (seq.tpot_s if seq.tpot_s < math.inf else DEFAULT_TPOT_S)
