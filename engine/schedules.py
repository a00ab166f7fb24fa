"""Four ways to serve a queue, as modes of one scheduler: who may start, who computes in a step, who leaves at an end.

`continuous` is iteration-level scheduling (Orca, Yu et al., 2022) and the way to serve; the others are what the
literature compares it with. Everything else is the same for all of them: KV blocks, chunks, sampling, one message a
step. None changes a token. Standard library only.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal, Protocol

from engine.sequence import EndReason, SamplingParams, Sequence, State

ScheduleName = Literal["sequential", "interleaved", "static", "continuous"]


class Schedule(Protocol):
    """Asked by the scheduler in every step. `running` is in the order of admission and is not to be changed."""

    def admits(self, running: list[Sequence], budget: int) -> bool:
        """May one more start? `budget` is what those that run leave of the step's tokens; it may be below zero."""

    def turn(self, running: list[Sequence], budget: int) -> list[Sequence]:
        """Who computes in this step, at most `budget` tokens together: decodes first, then prefills in this order."""

    def leaving(self, ended: Sequence, reason: EndReason, running: list[Sequence]) -> list[Sequence]:
        """Who gives up place and blocks now that `ended`, one of those that run, has ended."""


class Continuous:
    """Requests join and leave the batch at every step."""

    def admits(self, running: list[Sequence], budget: int) -> bool:
        return budget > 0

    def turn(self, running: list[Sequence], budget: int) -> list[Sequence]:
        return running

    def leaving(self, ended: Sequence, reason: EndReason, running: list[Sequence]) -> list[Sequence]:
        return [ended]


class Sequential(Continuous):
    """One request at a time, from its prompt to its end."""

    def admits(self, running: list[Sequence], budget: int) -> bool:
        return not running


class Interleaved(Continuous):
    """One step of each request in turn: a chunk of its prompt or one token. Fair, and no batch."""

    def __init__(self) -> None:
        self._round: deque[Sequence] = deque()

    def admits(self, running: list[Sequence], budget: int) -> bool:
        return True

    def turn(self, running: list[Sequence], budget: int) -> list[Sequence]:
        while running:
            if not self._round:
                self._round.extend(running)
            seq = self._round.popleft()
            if seq.state is State.RUNNING:
                return [seq]
        return []


class Static:
    """Batches that nobody joins or leaves: prompts padded to the longest, a row for each member until the last ends.

    As `generate` of a padded batch does, with two differences that favour it: tokens are delivered as they come, and
    memory is paged, neither padded nor reserved. The rows of the padding are computed and dropped: before the prompts,
    tokens 0 in the blocks that the prompts are written to afterwards; in place of a member that has finished, its last
    token again. Only the cancelled, expired and failed leave at once, as a client may rely on in every mode.
    """

    def __init__(self) -> None:
        self._forming = False
        self._padding = 0  # rows of the prompts' padding still to be computed

    def admits(self, running: list[Sequence], budget: int) -> bool:
        self._forming = self._forming or not running
        return self._forming

    def turn(self, running: list[Sequence], budget: int) -> list[Sequence]:
        if self._forming and running:
            self._forming = False
            longest = max(seq.remaining_len for seq in running)
            self._padding = sum(longest - seq.remaining_len for seq in running)
        if self._padding:
            return self._fillers(running, budget)
        return [seq for seq in running if seq.remaining_len > 1] or running

    def leaving(self, ended: Sequence, reason: EndReason, running: list[Sequence]) -> list[Sequence]:
        if all(seq is ended or seq.state is State.FINISHED for seq in running):
            return list(running)
        return [] if reason in (EndReason.STOP, EndReason.LENGTH) else [ended]

    def _fillers(self, running: list[Sequence], budget: int) -> list[Sequence]:
        """Padding for one step: at most a prompt's length in that prompt's own blocks, which it has not used yet."""
        fillers = []
        for seq in running:
            rows = min(seq.remaining_len, self._padding, budget)
            if rows == 0:
                break
            fillers.append(_filler(rows, seq.blocks[seq.num_published :]))
            self._padding -= rows
            budget -= rows
        return fillers


def _filler(rows: int, blocks: list[int]) -> Sequence:
    """Computed like any sequence; that it is finished already drops its outcome."""
    return Sequence(-1, [0] * rows, rows, SamplingParams(), 0.0, math.inf, state=State.FINISHED, blocks=blocks)


SCHEDULES: dict[ScheduleName, type[Schedule]] = {
    "sequential": Sequential,
    "interleaved": Interleaved,
    "static": Static,
    "continuous": Continuous,
}
