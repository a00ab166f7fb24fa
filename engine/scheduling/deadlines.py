"""Who has to leave because of its deadline, and when to look. Standard library only."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

from pagoda_server.engine.core.sequence import Sequence, State
from pagoda_server.engine.timing.cost_model import CostModel

LEAVING = 16  # sequences that leave in a step, as long as anybody runs


class Deadlines:
    """A sequence that waits leaves as soon as it cannot have a token by its deadline any more.

    One that runs leaves at its deadline: so few run that the scheduler looks at them all. Thousands may wait in vain
    from one step to the next, and to end each takes its time, so that they leave little by little.

    num_cached  of a sequence: its tokens that the prefix cache holds
    """

    def __init__(self, costs: CostModel, num_cached: Callable[[Sequence], int]) -> None:
        self._costs = costs
        self._num_cached = num_cached
        self._heap: list[tuple[float, int, Sequence]] = []  # by when to look; ended sequences linger until then
        self._prune_at = 64
        self._may_leave: float = math.inf  # in this step

    @property
    def next(self) -> float:
        """Until then nobody has to leave; math.inf if nobody ever has."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, seq: Sequence) -> None:
        if seq.deadline == math.inf:
            return
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if entry[2].state is not State.FINISHED]
            heapq.heapify(self._heap)
            self._prune_at = 2 * len(self._heap) + 64
        self._look_at(seq, seq.deadline - self._costs.least_s(seq, seq.remaining_len))

    def lost(self, now: float, *, is_bounded: bool) -> Iterator[Sequence]:
        """Those that wait in vain and leave in this step; the caller ends each before it takes the next.

        is_bounded  there is other work: at most LEAVING do, so that others do not wait for the rest
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
        """Counts one more that leaves in this step; False if as many have as may."""
        self._may_leave -= 1
        return self._may_leave >= 0

    def is_lost(self, seq: Sequence, now: float) -> bool:
        """Whether one that waits cannot have a token by its deadline any more."""
        return seq.deadline - self._costs.least_s(seq, seq.remaining_len) <= now and self._last_moment(seq) <= now

    def _last_moment(self, seq: Sequence) -> float:
        if seq.state is State.RUNNING:
            return seq.deadline
        remaining = seq.remaining_len
        if (cached := seq.deadline - self._costs.least_s(seq, 1)) == seq.deadline - self._costs.least_s(seq, remaining):
            return cached  # it needs one step in any case: what the cache holds need not be looked up
        return seq.deadline - self._costs.least_s(seq, remaining - self._num_cached(seq))

    def _look_at(self, seq: Sequence, when: float) -> None:
        heapq.heappush(self._heap, (when, seq.id, seq))
