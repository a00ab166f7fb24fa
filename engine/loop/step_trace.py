"""The step trace: what the last steps did, and why. Every step is recorded; a client may ask for the record.

Entries are plain tuples of numbers, strings and such tuples, which the garbage collector stops tracking. A step that
runs the same sequences as the one before shares the tuple of their ids.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from typing import Literal, TypeAlias

from ..core.sequence import EndReason, Sequence, State
from ..core.step import Chunk, Hold, StepOutput, StepPlan
from ..scheduling.scheduler import Scheduler

KEEP_S = 60.0
MAX_MOVES = 1 << 16
MAX_NUMBERS = 1 << 20  # ids and chunks over all steps: 8 MB, and the memory of their integers

MoveKind: TypeAlias = Literal["waits", "started", "preempted"] | EndReason

# ids, chunk starts, chunk lengths, idle ids, their holds, waiting, next in line (-1: none), its hold, running,
# blocks free, blocks evictable. The chunks belong to the last ids; all ids before them compute one token.
Sketch: TypeAlias = tuple[
    tuple[int, ...],
    tuple[int, ...],
    tuple[int, ...],
    tuple[int, ...],
    tuple[Hold, ...],
    int,
    int,
    Hold | None,
    int,
    int,
    int,
]
# from, until, what was planned
Step: TypeAlias = tuple[float, float, Sketch]
# at, kind, id, request id, arrived, prompt length, tokens, computed tokens, tenant
Move: TypeAlias = tuple[float, MoveKind, int, str, float, int, int, int, str]
_at = itemgetter(0)


@dataclass(frozen=True, slots=True)
class TraceSnapshot:
    """A copy of the record, oldest first. The last move of each live sequence is in it, even if older than `steps`."""

    taken_at: float
    token_budget: int
    max_num_seqs: int
    blocks_total: int
    steps: list[Step]
    moves: list[Move]


class StepTrace:
    """Records a scheduler's steps for KEEP_S seconds, or less if they are too large. The loop's thread owns it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps: deque[Step] = deque()
        self._moves: deque[Move] = deque(maxlen=MAX_MOVES)
        self._ids: tuple[int, ...] = ()
        self._num_numbers = 0
        self._forgotten_until = -math.inf

    def sketch(self, plan: StepPlan) -> Sketch:
        """Sketch the plan that was just made: what it computes, and why other sequences compute nothing."""
        scheduler, chunks = self._scheduler, plan.chunks
        ids = tuple([chunk.seq.id for chunk in chunks])
        if ids == self._ids:
            ids = self._ids
        self._ids = ids
        starts: tuple[int, ...] = ()
        lengths: tuple[int, ...] = ()
        if not _is_one_token(chunks[-1]):  # such chunks come first
            longer = [chunk for chunk in chunks if not _is_one_token(chunk)]
            starts = tuple([chunk.start for chunk in longer])
            lengths = tuple([chunk.length for chunk in longer])
        idle: tuple[int, ...] = ()
        holds: tuple[Hold, ...] = ()
        if len(scheduler.running) > len(chunks):
            idle, holds = self._idle(ids)
        waiting, pool = scheduler.waiting, scheduler.pool
        return (
            ids,
            starts,
            lengths,
            idle,
            holds,
            len(waiting),
            next(waiting.in_line()).id if waiting else -1,
            scheduler.hold,
            len(scheduler.running),
            pool.num_free,
            pool.num_evictable,
        )

    def add(self, sketch: Sketch, started: float, ended: float) -> None:
        """Record a step that has ended."""
        steps = self._steps
        self._num_numbers += _size(sketch, steps[-1][2] if steps else None)
        steps.append((started, ended, sketch))
        while (steps[0][1] < ended - KEEP_S or self._num_numbers > MAX_NUMBERS) and len(steps) > 1:
            _, self._forgotten_until, oldest = steps.popleft()
            self._num_numbers -= _size(oldest, steps[0][2])

    def note(self, output: StepOutput) -> None:
        """Record which sequences started, were preempted or ended."""
        noted: list[Move] = []
        for move in output.moves:
            kind: MoveKind = "started" if move.to is State.RUNNING else "preempted"
            noted.append(_move(move.seq, kind, move.at, move.num_computed))
        noted += [_move(ended.seq, ended.reason, ended.at, ended.seq.num_computed) for ended in output.ended]
        noted.sort(key=_at)
        self._moves.extend(noted)

    def take(self, last_s: float = math.inf) -> TraceSnapshot:
        """Return what is kept of the last `last_s` seconds. Costs what it returns, however much is kept."""
        scheduler = self._scheduler
        now = scheduler.clock()
        since = max(now - min(last_s, KEEP_S), self._forgotten_until)
        recent = list(takewhile(lambda move: move[0] >= since, reversed(self._moves)))[::-1]
        steps = list(takewhile(lambda step: step[1] >= since, reversed(self._steps)))[::-1]
        moved = {move[2] for move in recent}
        return TraceSnapshot(
            taken_at=now,
            token_budget=scheduler.token_budget,
            max_num_seqs=scheduler.max_num_seqs,
            blocks_total=scheduler.pool.num_blocks,
            steps=steps,
            moves=[*self._standing(moved), *recent],
        )

    def _idle(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Hold, ...]]:
        busy = set(ids)
        idle = [seq for seq in self._scheduler.running if seq.id not in busy]
        holds: list[Hold] = ["token pending" if seq.remaining_len == 1 else "no budget" for seq in idle]
        return tuple([seq.id for seq in idle]), tuple(holds)

    def _standing(self, moved: set[int]) -> Iterator[Move]:
        """Yield the last move of each live sequence that is not in `moved`."""
        for seq in [*self._scheduler.running, *self._scheduler.waiting]:
            if seq.id in moved or seq.state is State.FINISHED:
                continue
            if seq.state is State.RUNNING:
                yield _move(seq, "started", seq.account.booked_until, seq.num_computed)
            elif seq.account.first_scheduled is None:
                yield _move(seq, "waits", seq.request.arrived, 0)
            else:
                yield _move(seq, "preempted", seq.account.booked_until, seq.account.lost_tokens)


def _is_one_token(chunk: Chunk) -> bool:
    return chunk.length == 1 and chunk.samples


def _move(seq: Sequence, kind: MoveKind, at: float, num_computed: int) -> Move:
    return (
        at,
        kind,
        seq.id,
        seq.request.request_id,
        seq.request.arrived,
        seq.request.prompt_len,
        len(seq.tokens),
        num_computed,
        seq.request.tenant,
    )


def _size(sketch: Sketch, neighbour: Sketch | None) -> int:
    """Count the numbers that a sketch holds and its neighbour does not."""
    own = 0 if neighbour is not None and neighbour[0] is sketch[0] else len(sketch[0])
    return own + 2 * len(sketch[1]) + 2 * len(sketch[3])
