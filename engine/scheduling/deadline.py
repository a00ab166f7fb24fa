"""Goodput order: least slack first, and sequences that can no longer meet their target behind those that can.

Earliest deadline first is the best order while every target can be met, and the worst under overload, where it serves
the sequences that are already late. A sequence's slack is the time until it must start to meet its target: the target
for its first token, or for its next one if it was preempted, or its deadline if that is earlier. The start time allows
for the time that its prompt will likely take. Once the start time has passed the sequence is late and cannot count for
goodput. Late sequences wait in order of their start times. They get one start of `LATE_EVERY` while others wait, so the
last of 200 late sequences starts within 8 * 200 starts.

There is one queue, sorted by start time. Entries whose start time has passed are late; the queue is never re-sorted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from ..core.sequence import Sequence
from .policy import PolicySettings, SortedPolicy

LATE_EVERY = 8
DEFAULT_TTFT_S = 10.0  # for a request that names no target
DEFAULT_TPOT_S = 1.0


class LeastSlack(SortedPolicy):
    """Order sequences by slack and ignore priorities: a request has a target instead."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._starts = 0

    def add(self, seq: Sequence) -> None:
        start_by = min(_due(seq), seq.request.deadline) - self._settings.likely_time_s(seq)
        self._queue.add(seq, -start_by)

    def in_line(self) -> Iterator[Sequence]:
        num_late = self._queue.num_above(-self._settings.clock())
        is_turn_of_late = self._starts % LATE_EVERY == LATE_EVERY - 1
        if num_late and (is_turn_of_late or num_late == len(self._queue)):
            return islice(self._queue, num_late)
        return self._queue.behind(num_late)

    def started(self, seq: Sequence) -> None:
        self._starts += 1

    def rank(self, seq: Sequence) -> float:
        """Rank a sequence that has missed its first-token target lower: it loses nothing more by giving way."""
        first_token = self._settings.clock() if seq.account.first_token is None else seq.account.first_token
        return float(first_token - seq.request.arrived <= _ttft_s(seq))


def _ttft_s(seq: Sequence) -> float:
    return seq.request.ttft_s if seq.request.ttft_s < math.inf else DEFAULT_TTFT_S


def _due(seq: Sequence) -> float:
    """Return when the sequence's next token is due."""
    first_token = (
        seq.request.in_line_since + _ttft_s(seq) if seq.account.first_token is None else seq.account.first_token
    )
    return first_token + seq.output_len * (seq.request.tpot_s if seq.request.tpot_s < math.inf else DEFAULT_TPOT_S)
