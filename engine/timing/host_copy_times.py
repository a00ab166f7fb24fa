"""Whether copying blocks to and from host memory takes less time than computing them again, as measured. Standard
library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pagoda_server.engine.core.sequence import Chunk, Sequence, StepPlan
from pagoda_server.engine.timing.step_time_model import StepLoad, StepTimeModel

WEIGHT = 0.2  # of the last step that copied, in the mean time of a block
AGEING = 0.98  # of that mean, each time that it speaks against a copy: a first one that was slow is not for ever


class HostCopyTimes:
    """Learns how long a block's copy takes from what runners measured, and what computing takes from whole steps.

    clock  seconds, monotonic
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.block_s: float | None = None  # in either direction; None: nothing has been copied
        self._clock = clock
        self._model = StepTimeModel()
        self._started: deque[float] = deque()  # when the plans that are not committed were made
        self._last_end = 0.0

    def planned(self) -> None:
        self._started.append(self._clock())

    def committed(self, plan: StepPlan, copied_s: float) -> None:
        """The oldest plan is computed. copied_s: seconds that its saves and loads took."""
        now = self._clock()
        seconds = now - max(self._started.popleft(), self._last_end)
        self._last_end = now
        self._model.observe(StepLoad.of_plan(plan), max(0.0, seconds - copied_s))
        if copied_s > 0:
            mean = copied_s / (len(plan.saves) + len(plan.loads))
            self.block_s = mean if self.block_s is None else self.block_s + WEIGHT * (mean - self.block_s)

    def is_worth_saving(self, seq: Sequence, num_tokens: int, block_size: int) -> bool:
        """Whether to copy so many leading tokens there and back, rather than to compute them again."""
        return self._is_faster(2 * -(-num_tokens // block_size), seq, 0, num_tokens)

    def is_worth_loading(self, seq: Sequence, num_blocks: int, start: int, end: int) -> bool:
        """Whether to load so many blocks, rather than to compute tokens `start` to `end`."""
        return self._is_faster(num_blocks, seq, start, end)

    def _is_faster(self, num_copies: int, seq: Sequence, start: int, end: int) -> bool:
        if self.block_s is None or num_copies * self.block_s <= self.compute_s(seq, start, end):
            return True
        self.block_s *= AGEING
        return False

    def compute_s(self, seq: Sequence, start: int, end: int) -> float:
        """Seconds by which computing these tokens prolongs the steps that do."""
        plan = StepPlan([Chunk(seq, start, end - start, samples=False)])
        return self._model.predict(StepLoad.of_plan(plan)) - self._model.predict(StepLoad.of_plan(StepPlan([])))
