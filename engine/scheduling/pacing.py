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

from pagoda_server.engine.core.sequence import Chunk, Sequence
from pagoda_server.engine.timing.cost_model import CostModel

MIN_PREFILL = 4  # prompt tokens that every step has room for, however long they take
LEAST_GROWTH = 1.25  # a step may take this many times its decodes' own time, whatever the target
PROMPT_WEIGHT = 2.0  # how many slowed decodes a slowed prompt is worth: it also keeps its place in the batch empty
ADVANCE_EVERY = 8  # steps: each prompt that has been admitted advances at least once in as many


class Pacing:
    """
    costs         predicts step times
    token_budget  tokens of a step at most
    target_itl_s  how long a step that holds decodes should take at most; None: no such target
    """

    def __init__(self, costs: CostModel, token_budget: int, target_itl_s: float | None) -> None:
        self._costs = costs
        self._token_budget = token_budget
        self._target_itl_s = target_itl_s

    def budget(self, running: list[Sequence], num_startable: int) -> int:
        """Tokens of the next step, decodes included. `num_startable`: sequences that wait and would find a place."""
        if self._target_itl_s is None:
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
        alone_s = self._costs.decodes_s(decodes, keys)
        # A step that exceeds its expected time by as much as others did still holds the target.
        growth = max(LEAST_GROWTH, 1 + math.sqrt(PROMPT_WEIGHT * prompts / decodes))
        limit_s = max(self._target_itl_s / self._costs.excess, growth * alone_s)
        room = max(MIN_PREFILL, self._costs.tokens_within(limit_s - alone_s, start))
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
