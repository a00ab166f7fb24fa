"""How a step's tokens are shared between decodes, long prompts and short ones.

Stall-free batching with a fixed chunk (Sarathi-Serve, Agrawal et al., 2024) bounds a step by its token budget. Here the
bound is a time: beside decodes, prompts get the tokens that the cost model expects to fit into the target. Without
decodes, a longer time bounds a step, so that a slow machine does not seem to hang in a chunk with a long context. The
first steps hold few tokens, because only they show how fast the machine is.

A slow machine needs most of that time for its decodes alone. If prompts got only the rest, they would fill the batch so
slowly that throughput collapsed. A step may therefore grow to a multiple of its decodes' own time, whatever the target.
A step that takes g times as long as its decodes alone slows decodes down by g and prompts by g / (g - 1). The weighted
sum over all sequences is least at g = 1 + sqrt(weight * prompts / decodes): many prompts beside few decodes get a large
share, one prompt beside many decodes a small one.

Short prompts may use up to half of the remaining budget; the oldest prompt gets the rest. Short prompts thus never wait
for long ones, and a long prompt takes at most twice its time unless other sequences outrank it.

A sequence that starts from host memory loads blocks before it computes. Beside decodes a step loads as many as lengthen
it by LOAD_PART, so that a long prompt that comes from another engine, or from the file, stalls no stream either.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator

from ..core.sequence import Sequence
from ..core.step import Chunk
from ..timing.cost_model import CostModel

FIRST_PREFILL = 64  # prompt tokens of a step before any step has shown how fast the machine is
MIN_PREFILL = 4  # prompt tokens that every step has room for, however long they take
LEAST_GROWTH = 1.25  # a step may take this many times its decodes' own time, whatever the target
PROMPT_WEIGHT = 2.0  # how many slowed decodes a slowed prompt is worth: it also keeps its place in the batch empty
LOAD_PART = 0.15  # of its decodes' own time, by which a step may grow for blocks from host memory
FIRST_LOADS = 8  # blocks of a step before any copy has been timed
ADVANCE_EVERY = 8  # steps: each admitted prompt that loads no blocks any more advances at least once in as many
OVERTAKING = 64  # how many sequences at the head of the queue a short prompt can overtake


class Pacing:
    """
    costs         predicts step times
    token_budget  tokens of a step at most
    target_itl_s  how long a step that holds decodes should take at most; None: no such target
    longest_s     how long prompts may make any step
    """

    def __init__(
        self, costs: CostModel, token_budget: int, target_itl_s: float | None, longest_s: float = math.inf
    ) -> None:
        self._costs = costs
        self._token_budget = token_budget
        self._target_itl_s = target_itl_s
        self._longest_s = longest_s

    def budget(self, running: list[Sequence], num_startable: int) -> int:
        """Return how many tokens the next step may hold, decodes included.

        num_startable  waiting sequences that would find a place
        """
        if self._target_itl_s is None and self._longest_s == math.inf:
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
        alone_s = self._costs.decodes_s(decodes, keys)
        limit_s = max(self._longest_s, LEAST_GROWTH * alone_s)
        if decodes and self._target_itl_s is not None:
            # A step that exceeds its expected time by as much as others did still holds the target.
            growth = max(LEAST_GROWTH, 1 + math.sqrt(PROMPT_WEIGHT * prompts / decodes))
            limit_s = min(limit_s, max(self._target_itl_s / self._costs.excess, growth * alone_s))
        if limit_s == math.inf:
            return self._token_budget
        room = FIRST_PREFILL
        if self._costs.has_measured:
            room = max(MIN_PREFILL, self._costs.tokens_within(limit_s - alone_s, start))
        return min(self._token_budget, decodes + room)

    def most_loads(self, running: Iterable[Sequence]) -> int:
        """Return how many blocks the next step may load from host memory beside these sequences; at least one."""
        lengths = [seq.num_computed for seq in running if len(seq.tokens) + seq.num_pending - seq.num_computed == 1]
        if not lengths:
            return sys.maxsize
        if (copy_s := self._costs.block_copy_s) is None:
            return FIRST_LOADS
        return max(1, int(LOAD_PART * self._costs.decodes_s(len(lengths), sum(lengths)) / copy_s))

    def newcomer(self, in_line: Iterator[Sequence], running: list[Sequence], budget: int) -> Sequence | None:
        """Return the waiting sequence that may start: the next in line or, if the budget is spent, a short prompt.

        in_line  at most OVERTAKING waiting sequences, and at least one
        budget   tokens that the running sequences leave of the step; may be negative
        """
        if budget > 0:
            return next(in_line)
        half = self._token_budget // 2
        spare = half - sum(seq.remaining_len for seq in running if 1 < seq.remaining_len <= half)
        return next((seq for seq in in_line if seq.remaining_len <= spare), None)

    def chunks(
        self,
        running: list[Sequence],
        budget: int,
        rank: Callable[[Sequence], float],
        idle_plans: Callable[[Sequence], int],
    ) -> list[Chunk]:
        """Share a step between running sequences, decodes first.

        A prompt that has not advanced for ADVANCE_EVERY steps gets a token even beyond the budget. The token budget is
        never exceeded, as it is larger than the number of sequences.

        rank        the policy's: the prompt of the highest rank comes first
        idle_plans  how many plans, this one included, it is since a prompt advanced
        """
        chunks: list[Chunk] = []
        prompts: list[Sequence] = []
        for seq in running:
            start = seq.num_computed
            if len(seq.tokens) + seq.num_pending - start == 1:
                chunks.append(Chunk(seq, start, 1, True))
            else:
                prompts.append(seq)
        if not prompts:
            return chunks
        prompts = _in_turn(prompts, budget - len(chunks), rank)
        overdue = [idle_plans(seq) >= ADVANCE_EVERY for seq in prompts]
        budget = max(0, budget - len(chunks) - sum(overdue))
        for seq, is_overdue in zip(prompts, overdue, strict=True):
            length = min(seq.remaining_len, budget + is_overdue)
            if length:
                chunks.append(Chunk(seq, seq.num_computed, length, length == seq.remaining_len))
                budget -= length - is_overdue
        return chunks


def _in_turn(prompts: list[Sequence], budget: int, rank: Callable[[Sequence], float]) -> list[Sequence]:
    """Order prompts: the shortest, as far as half of the budget holds them, then the oldest of the highest rank."""
    if len(prompts) < 2 or sum(seq.remaining_len for seq in prompts) <= budget:
        return prompts
    oldest, *others = sorted(prompts, key=rank, reverse=True)
    spare = budget // 2
    ahead: list[Sequence] = []
    for seq in sorted(others, key=lambda seq: seq.remaining_len):
        spare -= seq.remaining_len
        if spare < 0:
            break
        ahead.append(seq)
    passed = {seq.id for seq in ahead}
    return [*ahead, oldest, *(seq for seq in others if seq.id not in passed)]
