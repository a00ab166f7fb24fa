"""Four ways to serve a queue, as modes of one scheduler: who may start, who computes in a step, who leaves at an end.

`continuous` is iteration-level scheduling (Orca, Yu et al., 2022) and the way to serve; the others are what the
literature compares it with. Everything else is the same for all of them: KV blocks, chunks, sampling, one message a
step. None changes a token. Standard library only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Literal, Protocol

from pagoda_server.engine.core.sequence import EndReason, SamplingParams, Sequence, State
from pagoda_server.engine.scheduling.policies import Policy

ScheduleName = Literal["sequential", "interleaved", "static", "continuous"]


OVERTAKING = 64  # how many of those next in line a short prompt can overtake


class Schedule(Protocol):
    """Asked by the scheduler in every step. `running` is in the order of admission; neither it nor `waiting`, of whom
    there is somebody, is to be changed.
    """

    def __init__(self, token_budget: int) -> None: ...

    def pick(self, waiting: Policy, running: list[Sequence], budget: int) -> Sequence | None:
        """Who of those that wait may start. `budget`: what those that run leave of the step, or below zero."""

    def turn(self, running: list[Sequence], budget: int, rank: Callable[[Sequence], float]) -> list[Sequence]:
        """Who computes in this step, at most `budget` tokens together: decodes first, then prefills in this order.

        rank  the policy's: a higher one's prompt comes first
        """

    def leaving(self, ended: Sequence, reason: EndReason, running: list[Sequence]) -> list[Sequence]:
        """Who gives up place and blocks now that `ended`, one of those that run, has ended."""


class Continuous:
    """Requests join and leave the batch at every step.

    Of what decodes leave of a step, short prompts take up to half before the one that has waited longest has the rest:
    they do not wait until long prompts are computed, and a long prompt takes twice its time at most, unless others
    outrank it.
    """

    def __init__(self, token_budget: int) -> None:
        self._half = token_budget // 2

    def pick(self, waiting: Policy, running: list[Sequence], budget: int) -> Sequence | None:
        in_line = waiting.in_line()
        if budget > 0:
            return next(in_line)
        spare = self._half - sum(seq.remaining_len for seq in running if 1 < seq.remaining_len <= self._half)
        return next((seq for seq in islice(in_line, OVERTAKING) if seq.remaining_len <= spare), None)

    def turn(self, running: list[Sequence], budget: int, rank: Callable[[Sequence], float]) -> list[Sequence]:
        prefills = [seq for seq in running if len(seq.tokens) + seq.num_pending - seq.num_computed > 1]
        budget -= len(running) - len(prefills)
        if len(prefills) < 2 or sum(seq.remaining_len for seq in prefills) <= budget:
            return running
        decodes = [seq for seq in running if seq.remaining_len <= 1]
        oldest, *others = sorted(prefills, key=rank, reverse=True)
        spare = budget // 2
        ahead: list[Sequence] = []
        for seq in sorted(others, key=lambda seq: seq.remaining_len):
            spare -= seq.remaining_len
            if spare < 0:
                break
            ahead.append(seq)
        passed = {seq.id for seq in ahead}
        return [*decodes, *ahead, oldest, *(seq for seq in others if seq.id not in passed)]

    def leaving(self, ended: Sequence, reason: EndReason, running: list[Sequence]) -> list[Sequence]:
        return [ended]


class Sequential(Continuous):
    """One request at a time, from its prompt to its end."""

    def pick(self, waiting: Policy, running: list[Sequence], budget: int) -> Sequence | None:
        return None if running else next(waiting.in_line())


class Interleaved(Continuous):
    """One step of each request in turn: a chunk of its prompt or one token. Fair, and no batch."""

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget)
        self._round: deque[Sequence] = deque()

    def pick(self, waiting: Policy, running: list[Sequence], budget: int) -> Sequence | None:
        return next(waiting.in_line())

    def turn(self, running: list[Sequence], budget: int, rank: Callable[[Sequence], float]) -> list[Sequence]:
        while running:
            if not self._round:
                self._round.extend(running)
            seq = self._round.popleft()
            if seq.state is State.RUNNING and not seq.awaits_token:
                return [seq]
        return []


class Static:
    """Batches that nobody joins or leaves: prompts padded to the longest, a row for each member until the last ends.

    As `generate` of a padded batch does, with two differences that favour it: tokens are delivered as they come, and
    memory is paged, neither padded nor reserved. The rows of the padding are computed and dropped: before the prompts,
    tokens 0 in the blocks that the prompts are written to afterwards; in place of a member that has finished, its last
    token again. Only the cancelled, expired and failed leave at once, as a client may rely on in every mode.
    """

    def __init__(self, token_budget: int) -> None:
        self._forming = False
        self._padding = 0  # rows of the prompts' padding still to be computed

    def pick(self, waiting: Policy, running: list[Sequence], budget: int) -> Sequence | None:
        self._forming = self._forming or not running
        return next(waiting.in_line()) if self._forming else None

    def turn(self, running: list[Sequence], budget: int, rank: Callable[[Sequence], float]) -> list[Sequence]:
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
