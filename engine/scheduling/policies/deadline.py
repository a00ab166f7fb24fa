"""Goodput order: least slack first, and what can no longer meet its target behind what can. Standard library only.

Earliest deadline first is the best order as long as all can be met, and the worst under overload, when it spends itself
on those that are late already. A sequence's slack is the time until it must start to meet its target: that of the first
token, or of the next one if it has been preempted, or its deadline if that is earlier. It is taken from the time that
its prompt will likely take, not from the least. Once that moment is past, it is late, and counts for no goodput
whenever it runs. Late ones wait in the order in which they became so, and have one start of `LATE_EVERY` while others
wait as well, so that they do not wait without end: of two hundred late ones the last starts within 8 * 200 starts.

There is one queue, by the last moment to start. Late are those before now: that thousands become so at once moves
nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.engine.scheduling.policies.policy import PolicySettings
from pagoda_server.engine.scheduling.policies.sorted_queue import SortedQueue

LATE_EVERY = 8
DEFAULT_TTFT_S = 10.0  # of a request that names no target
DEFAULT_TPOT_S = 1.0


class Deadline:
    """Priorities count for nothing: a target is what a request has instead."""

    def __init__(self, settings: PolicySettings) -> None:
        self._clock = settings.clock
        self._likely_time_s = settings.likely_time_s
        self._queue = SortedQueue()  # by the last moment to start, the earliest first
        self._starts = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, seq: Sequence) -> None:
        self._queue.add(seq, self._likely_time_s(seq) - min(_due(seq), seq.deadline))

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)

    def in_line(self) -> Iterator[Sequence]:
        num_late = self._queue.num_above(-self._clock())
        is_turn_of_late = self._starts % LATE_EVERY == LATE_EVERY - 1
        if num_late and (is_turn_of_late or num_late == len(self._queue)):
            return islice(self._queue, num_late)
        return self._queue.behind(num_late)

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
    first_token = seq.in_line_since + _ttft_s(seq) if seq.first_token is None else seq.first_token
    return first_token + seq.output_len * (seq.tpot_s if seq.tpot_s < math.inf else DEFAULT_TPOT_S)
