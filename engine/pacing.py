"""How much of a step is prefill: what holds the target for a token's time, as far as steps have been measured.

Stall-free batching with a fixed chunk (Sarathi-Serve, Agrawal et al., 2024) bounds a step by its token budget. Here the
bound is a time: beside decodes, prompts get what the learned step time leaves of the target, and at least
`MIN_PREFILL` tokens, so that a target which decodes alone exceed still lets prompts advance. Standard library only.
"""

from __future__ import annotations

from collections import deque

from engine.least_time import LeastTime
from engine.sequence import Chunk, Sequence, StepPlan
from engine.step_time_model import StepLoad, StepTimeModel

MIN_PREFILL = 16  # prompt tokens of a step, whatever they take
ADVANCE_EVERY = 8  # steps: each prompt that has been admitted advances once in as many


class Pacing:
    """
    token_budget  tokens of a step at most
    target_itl_s  of a step that holds decodes; None: the token budget alone limits it
    """

    def __init__(self, token_budget: int, target_itl_s: float | None) -> None:
        self.least_time = LeastTime(token_budget)
        self.model = StepTimeModel()
        self._token_budget = token_budget
        self._target_itl_s = target_itl_s
        self._started: deque[float] = deque()  # when the steps that are not committed were scheduled
        self._last_end = 0.0

    def scheduled(self, now: float) -> None:
        self._started.append(now)

    def committed(self, plan: StepPlan, now: float) -> None:
        """Steps are computed one after the other: one that was scheduled early began when the one before had ended."""
        seconds = now - max(self._started.popleft(), self._last_end)
        self._last_end = now
        self.least_time.observe(plan.num_tokens, seconds)
        if self._target_itl_s is not None:
            self.model.observe(StepLoad.of_plan(plan), seconds)

    def budget(self, running: list[Sequence]) -> int:
        """Tokens of the next step, decodes included."""
        if self._target_itl_s is None:
            return self._token_budget
        decodes = [seq for seq in running if seq.remaining_len == 1]
        if not decodes:
            return self._token_budget
        keys = sum(seq.num_computed for seq in decodes)
        read = max((seq.num_computed for seq in running if seq.remaining_len > 1), default=0)
        rest_s = self._target_itl_s - self.model.predict(StepLoad.of(len(decodes), keys, 0, 0))
        token_s = self.model.predict(StepLoad.of(0, 0, 1, read)) - self.model.parts[0]
        room = int(rest_s / token_s) if token_s > 0 else self._token_budget if rest_s > 0 else 0
        return min(self._token_budget, len(decodes) + max(MIN_PREFILL, room))

    def cut(self, turn: list[Sequence], budget: int, number: int) -> StepPlan:
        """Chunks of these sequences, decodes first. `number`: of this plan.

        A prompt whose turn has not come in ADVANCE_EVERY steps gets a token even beyond the budget, but never beyond
        the token budget, since that exceeds the number of sequences.
        """
        chunks: list[Chunk] = []
        prefills: list[Sequence] = []
        for seq in turn:
            start = seq.num_computed
            if len(seq.tokens) + seq.num_pending - start == 1:
                chunks.append(Chunk(seq, start, 1, True))
            else:
                prefills.append(seq)
        overdue = [number - seq.last_plan >= ADVANCE_EVERY for seq in prefills]
        budget = max(0, budget - len(chunks) - sum(overdue))
        for seq, is_overdue in zip(prefills, overdue, strict=True):
            length = min(seq.remaining_len, budget + is_overdue)
            if length:
                chunks.append(Chunk(seq, seq.num_computed, length, length == seq.remaining_len))
                budget -= length - is_overdue
        return StepPlan(chunks)
