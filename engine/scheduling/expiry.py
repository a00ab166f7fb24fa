"""Which sequences must leave because of their deadlines, and when to look at them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

from ..core.sequence import Sequence, State
from ..timing.cost_model import CostModel

LEAVING = 16  # sequences that leave in a step while others run


class Deadlines:
    """A waiting sequence leaves as soon as it can no longer have a token by its deadline.

    A running one leaves at its deadline; the scheduler looks at all of them then, as they are few. Thousands of
    waiting sequences may become hopeless at once. Ending each takes time, so they leave little by little.

    num_cached  counts the tokens of a sequence that the prefix cache holds
    """

    def __init__(self, costs: CostModel, num_cached: Callable[[Sequence], int]) -> None:
        self._costs = costs
        self._num_cached = num_cached
        self._heap: list[tuple[float, int, Sequence]] = []  # by the time to look at it; ended ones linger until then
        self._prune_at = 64
        self._may_leave: float = math.inf  # in this step

    @property
    def next(self) -> float:
        """Until then no sequence has to leave; math.inf if none ever has."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, seq: Sequence) -> None:
        if seq.request.deadline == math.inf:
            return
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if entry[2].state is not State.FINISHED]
            heapq.heapify(self._heap)
            self._prune_at = 2 * len(self._heap) + 64
        self._look_at(seq, seq.request.deadline - self._costs.least_s(seq, seq.remaining_len))

    def lost(self, now: float, *, is_bounded: bool) -> Iterator[Sequence]:
        """Yield the waiting sequences that leave in this step. The caller must end each before it takes the next.

        is_bounded  there is other work, which must not wait: at most LEAVING leave
        """
        self._may_leave = LEAVING if is_bounded else math.inf
        while self._heap and self._heap[0][0] <= now and self.takes_leave():
            seq = heapq.heappop(self._heap)[2]
            if seq.state is State.FINISHED:
                continue
            last = self._last_moment(seq)
            if last <= now and seq.state is State.WAITING:
                yield seq
            else:
                self._look_at(seq, max(last, math.nextafter(now, math.inf)))

    def takes_leave(self) -> bool:
        """Count one more that leaves in this step; return False if no more may."""
        self._may_leave -= 1
        return self._may_leave >= 0

    def is_lost(self, seq: Sequence, now: float) -> bool:
        """Say whether a waiting sequence can no longer have a token by its deadline."""
        return (
            seq.request.deadline - self._costs.least_s(seq, seq.remaining_len) <= now and self._last_moment(seq) <= now
        )

    def _last_moment(self, seq: Sequence) -> float:
        if seq.state is State.RUNNING:
            return seq.request.deadline
        remaining = seq.remaining_len
        if (cached := seq.request.deadline - self._costs.least_s(seq, 1)) == seq.request.deadline - self._costs.least_s(
            seq, remaining
        ):
            return cached  # it needs one step in any case, so the cache need not be searched
        return seq.request.deadline - self._costs.least_s(seq, remaining - self._num_cached(seq))

    def _look_at(self, seq: Sequence, when: float) -> None:
        heapq.heappush(self._heap, (when, seq.id, seq))
