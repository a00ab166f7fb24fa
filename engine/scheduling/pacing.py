"""How much of a step is prefill: what holds the targets for a token's time, as far as steps have been measured.

Stall-free batching with a fixed chunk (Sarathi-Serve, Agrawal et al., 2024) bounds a step by its token budget. Here the
bound is a time: beside decodes, prompts get what the learned step time leaves of it.

A slow machine needs most of that time for its decodes alone. Prompts that got only the rest would fill the batch so
slowly that throughput collapsed, so a step may grow to a multiple of its decodes' own time whatever the target is. A
step that takes g times as long as its decodes alone slows decodes down by g and prompts by g / (g - 1). The weighted
sum over all sequences is least at g = 1 + sqrt(weight * prompts / decodes): many prompts beside few decodes get a
large share, one beside many a small one. Standard library only.
"""

from __future__ import annotations

import math
from collections import deque

from pagoda_server.engine.core.sequence import Chunk, Sequence, StepPlan
from pagoda_server.engine.timing.least_time import LeastTime
from pagoda_server.engine.timing.likely_time import LikelyTime
from pagoda_server.engine.timing.running_quantile import RunningQuantile
from pagoda_server.engine.timing.step_time_model import StepLoad, StepTimeModel

MIN_PREFILL = 4  # prompt tokens of a step, whatever they take
LEAST_GROWTH = 1.25  # times what its decodes alone would take: a step may take as long, whatever the target
PROMPT_WEIGHT = 2.0  # how many slowed decodes a slowed prompt is worth: it also keeps its place in the batch empty
ADVANCE_EVERY = 8  # steps: each prompt that has been admitted advances once in as many
HELD = 0.99  # part of the steps beside decodes that are to hold the target
MEASURED = 256  # of them that say how far steps exceed what the model expects of them


class Pacing:
    """
    token_budget  tokens of a step at most
    target_itl_s  a step that holds decodes is to take so long at most; None: no such target
    """

    def __init__(self, token_budget: int, target_itl_s: float | None) -> None:
        self.least_time = LeastTime(token_budget)
        self.likely_time = LikelyTime(token_budget)
        self.model = StepTimeModel()
        self._token_budget = token_budget
        self._target_itl_s = math.inf if target_itl_s is None else target_itl_s
        self._is_limited = target_itl_s is not None
        self._excess = RunningQuantile(HELD, MEASURED)  # measured ÷ expected, of steps with decodes
        self._started: deque[float] = deque()  # when the steps that are not committed were scheduled
        self._last_end = 0.0
        self._goes_on = False  # from one step to the next, without rest

    def scheduled(self, now: float) -> None:
        self._started.append(self._last_end if self._goes_on and not self._started else now)

    def committed(self, plan: StepPlan, now: float) -> None:
        """Steps are computed one after the other: one that was scheduled early began when the one before had ended."""
        seconds = now - max(self._started.popleft(), self._last_end)
        self._last_end = now
        self.least_time.observe(plan.num_tokens, seconds)
        self.likely_time.observe(plan, seconds)
        if self._is_limited:
            load = StepLoad.of_plan(plan)
            excess = self.model.observe(load, seconds)
            if load.decodes and excess is not None:
                self._excess.add(excess)

    def budget(self, running: list[Sequence], num_startable: int) -> int:
        """Tokens of the next step, decodes included. `num_startable`: sequences that wait and would find a place."""
        self._goes_on = bool(running)
        if not self._is_limited:
            return self._token_budget
        decodes = keys = start = 0
        prompts = num_startable
        for seq in running:
            remaining = len(seq.tokens) + seq.num_pending - seq.num_computed
            if remaining == 1:
                decodes += 1
                keys += seq.num_computed
            elif remaining > 1:
                prompts += 1
                start = max(start, seq.num_computed)
        if not decodes:
            return self._token_budget
        alone_s = self.model.predict(StepLoad.of(decodes, keys))
        # A step that exceeds its expected time by as much as others did still holds the target.
        growth = max(LEAST_GROWTH, 1 + math.sqrt(PROMPT_WEIGHT * prompts / decodes))
        limit_s = max(self._target_itl_s / max(1.0, self._excess.value(1.0)), growth * alone_s)
        room = max(MIN_PREFILL, self.model.tokens_within(limit_s - alone_s, start))
        return min(self._token_budget, decodes + room)

    def cut(self, turn: list[Sequence], budget: int, number: int) -> list[Chunk]:
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
        return chunks
