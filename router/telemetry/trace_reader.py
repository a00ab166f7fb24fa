"""Reads the step traces of one engine, which overlap, into rows, cells and rates: for the page and `pagoda top`."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pagoda.v1 import trace_pb2

INTERVAL_S = 0.25  # in which rates are counted

MoveKind = trace_pb2.MoveKind
HoldReason = trace_pb2.HoldReason

ENDS = {
    MoveKind.MOVE_KIND_FINISHED: "finished",
    MoveKind.MOVE_KIND_ABORTED: "cancelled",
    MoveKind.MOVE_KIND_EXPIRED: "expired",
    MoveKind.MOVE_KIND_REJECTED: "rejected",
    MoveKind.MOVE_KIND_FAILED: "failed",
}


@dataclass(slots=True)
class Row:
    """A sequence. Times are those of the engine's clock.

    state    the cell of what it does, or did last
    end      how it ended; "" while it is live
    moved    the time of its last start or preemption that was read
    emitted  the end of the step that computed its last token; 0 if that step was not read
    """

    request_id: str
    tenant: str
    arrived: float
    prompt_tokens: int
    tokens: int
    computed: int
    state: str = "w"
    end: str = ""
    moved: float = -math.inf
    ended: float = math.inf
    emitted: float = 0.0

    @property
    def idle_cell(self) -> str:
        """The cell of a step in which it took no part."""
        return "h" if self.state in "dp" else self.state


@dataclass(slots=True)
class Column:
    """What sequences did in a step, or in steps that all did the same.

    cells  a letter for each sequence that had arrived: `d` decode, `p` prefill, `w` waiting, `x` preempted, `h` held
    """

    cells: dict[int, str]
    start_s: float
    end_s: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Reading:
    """What a trace adds: the rows, by sequence, and the steps that were not read before, oldest first.

    num_others  live sequences without a row
    """

    rows: dict[int, Row]
    columns: Sequence[Column]
    num_others: int


@dataclass(slots=True)
class Rate:
    """What an engine computed in an interval of time, by INTERVAL_S. Times are in milliseconds."""

    tokens: int = 0
    prompt_tokens: int = 0
    itl: Counter[float] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)


Rates: TypeAlias = dict[int, Rate]  # by age, in intervals


class TraceReader:
    """Reads traces of one engine that overlap, each step once.

    Times to first token and between tokens come from here, not from the calls: it costs the calls nothing, several
    routers need not add up theirs, and a caller's own trace gives its own times.

    max_rows     sequences that have a row
    max_columns  steps of a reading, the last ones
    """

    def __init__(self, max_rows: int = sys.maxsize, max_columns: int = sys.maxsize) -> None:
        self._max_rows = max_rows
        self._max_columns = max_columns
        self._rows: dict[int, Row] = {}
        self._shown: dict[int, None] = {}
        self._gone: set[int] = set()  # sequences whose ends were reported, while a trace still has them
        self._read_until = -math.inf
        # A run: consecutive steps that each computed one token for the same sequences. They are counted at once.
        self._run: tuple[int, ...] = ()
        self._run_steps = 0
        self._run_end = 0.0

    def read(self, parts: Sequence[trace_pb2.StepTracePart], rates: Rates) -> Reading:
        """Read a trace, and add what is new in it to `rates`."""
        moves = [move for part in parts for move in part.moves]
        self._gone &= {move.sequence for move in moves}
        moves = sorted((move for move in moves if move.sequence not in self._gone), key=lambda move: move.at_s)
        arrivals = []
        for move in moves:
            if move.sequence not in self._rows:
                self._rows[move.sequence] = _row_of(move)
                arrivals.append(move.arrived_s)
        arrivals.sort(reverse=True)
        moves.reverse()
        self._forget_all_but({move.sequence for move in moves})
        shown = self._choose()
        columns: deque[Column] = deque()
        num_columns = 0
        current: list[trace_pb2.TracedMove] = []
        ids: tuple[int, ...] = ()
        for part in parts:
            for step in part.steps:
                if step.sequences or part.is_partial:
                    ids = tuple(step.sequences)
                if step.end_s <= self._read_until:
                    continue
                self._read_until = step.end_s
                is_like_before = len(columns) > 0
                while arrivals and arrivals[-1] < step.end_s:
                    arrivals.pop()
                    is_like_before = False
                while moves and moves[-1].at_s < step.end_s:
                    self._apply(moves.pop(), current)
                    is_like_before = False
                rate = rates.setdefault(int((part.taken_at_s - step.end_s) / INTERVAL_S), Rate())
                if self._count(step, ids, rate) and is_like_before:
                    columns[-1].steps += 1
                    columns[-1].end_s = step.end_s
                else:
                    columns.append(Column(self._cells(step, ids, shown), step.start_s, step.end_s))
                num_columns += 1
                if num_columns > self._max_columns:
                    num_columns -= 1
                    columns[0].steps -= 1
                    if not columns[0].steps:
                        columns.popleft()
        self._end_run()
        for move in reversed(moves):
            self._apply(move, current)
        for move in current:
            row = self._rows[move.sequence]
            if row.emitted:  # a step was read
                age = int(max(0.0, parts[-1].taken_at_s - self._read_until) / INTERVAL_S)
                self._accept(row, move.tokens, rates.setdefault(age, Rate()))
            row.tokens = max(row.tokens, move.tokens)  # a start that is reported again has the number of that time
            row.computed = max(row.computed, move.computed_tokens)
        rows = {id: self._rows[id] for id in shown}
        self._drop_ended()
        return Reading(rows, columns, len(self._rows) - len(self._shown))

    def _forget_all_but(self, ids: set[int]) -> None:
        """Forget sequences that the trace no longer has: they ended while nothing watched."""
        for id in self._rows.keys() - ids:
            del self._rows[id]
            self._shown.pop(id, None)

    def _drop_ended(self) -> None:
        for id in [id for id, row in self._rows.items() if row.ended < math.inf]:
            del self._rows[id]
            self._shown.pop(id, None)
            self._gone.add(id)

    def _choose(self) -> list[int]:
        """The sequences that are shown: those that were, and others in the order of their arrival."""
        if len(self._shown) < self._max_rows:
            others = sorted(self._rows.keys() - self._shown.keys(), key=lambda id: (self._rows[id].state == "w", id))
            for id in others[: self._max_rows - len(self._shown)]:
                self._shown[id] = None
        return list(self._shown)

    def _apply(self, move: trace_pb2.TracedMove, current: list[trace_pb2.TracedMove]) -> None:
        """Note a move, unless an earlier trace had it. Adds moves that have the latest numbers to `current`."""
        row = self._rows[move.sequence]
        if move.kind in ENDS:
            row.end, row.ended = ENDS[move.kind], move.at_s
            current.append(move)
        elif move.kind == MoveKind.MOVE_KIND_STARTED and (row.state not in "wx" or move.at_s <= row.moved):
            current.append(move)
        elif move.at_s > row.moved:
            if move.kind == MoveKind.MOVE_KIND_STARTED:
                row.state, row.computed = "h", move.computed_tokens
            elif move.kind == MoveKind.MOVE_KIND_PREEMPTED:
                row.state, row.computed = "x", 0
            row.moved = move.at_s

    def _cells(self, step: trace_pb2.TracedStep, ids: tuple[int, ...], shown: list[int]) -> dict[int, str]:
        cells = {
            id: row.idle_cell
            for id in shown
            if (row := self._rows[id]).arrived <= step.end_s and row.ended > step.end_s
        }
        num_decodes = len(ids) - len(step.chunk_lengths)
        for id, start in zip(ids, (*[math.inf] * num_decodes, *step.chunk_starts), strict=True):
            if (row_of := self._rows.get(id)) is not None and row_of.ended > step.start_s:
                # Behind the prompt, a chunk verifies drafts, or computes tokens that no step chose.
                cells[id] = cell = "d" if start >= row_of.prompt_tokens else "p"
                if row_of.ended == math.inf:
                    row_of.state = cell
        return cells

    # -- tokens and times -------------------------------------------------------------------------------------------

    def _count(self, step: trace_pb2.TracedStep, ids: tuple[int, ...], rate: Rate) -> bool:
        """Count a step's tokens and times. Returns whether it goes on with the run of the step before."""
        if ids and ids == self._run and not step.chunk_lengths:
            rate.tokens += len(ids)
            rate.itl[_ms(step.end_s - self._run_end)] += len(ids)
            self._run_steps += 1
            self._run_end = step.end_s
            return True
        self._end_run()
        num_decodes = len(ids) - len(step.chunk_lengths)
        for id in ids[:num_decodes]:
            self._emit(id, step, rate)
        for id, start, length in zip(ids[num_decodes:], step.chunk_starts, step.chunk_lengths, strict=True):
            row = self._rows.get(id)
            rate.prompt_tokens += length if row is None else max(0, min(start + length, row.prompt_tokens) - start)
            if row is not None:
                if start >= row.prompt_tokens:
                    self._accept(row, start + 1, rate)
                row.computed = start + length
                if row.computed >= row.tokens:
                    self._emit(id, step, rate)
        if not step.chunk_lengths:
            self._run, self._run_end = ids, step.end_s
        return False

    def _end_run(self) -> None:
        """Give the sequences of a run the tokens that were counted for all of them."""
        if self._run_steps:
            for id in self._run:
                if (row := self._rows.get(id)) is not None:
                    row.tokens += self._run_steps
                    row.computed += self._run_steps
                    row.emitted = self._run_end
        self._run, self._run_steps = (), 0

    def _accept(self, row: Row, num_tokens: int, rate: Rate) -> None:
        """Count the drafts that the sequence's last step turned into tokens: they arrived together with its first."""
        if row.emitted and (num_accepted := num_tokens - row.tokens) > 0:
            rate.tokens += num_accepted
            rate.itl[0.0] += num_accepted
            row.tokens = num_tokens

    def _emit(self, id: int, step: trace_pb2.TracedStep, rate: Rate) -> None:
        row = self._rows.get(id)
        if row is None or row.ended <= step.start_s:  # computed and dropped: it had ended
            return
        rate.tokens += 1
        if row.tokens <= row.prompt_tokens:
            rate.ttft.append(_ms(step.end_s - row.arrived))
        elif row.emitted:
            rate.itl[_ms(step.end_s - row.emitted)] += 1
        row.tokens += 1
        row.computed = row.tokens - 1
        row.emitted = step.end_s


def _row_of(move: trace_pb2.TracedMove) -> Row:
    # A move is noted after its step: the first token of a sequence that starts with it is counted already.
    tokens = move.tokens if move.tokens > move.prompt_tokens + 1 else move.prompt_tokens
    row = Row(move.request_id, move.tenant, move.arrived_s, move.prompt_tokens, tokens, move.computed_tokens)
    if move.kind == MoveKind.MOVE_KIND_PREEMPTED:
        row.state = "x"
    return row


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def hold_name(reason: trace_pb2.HoldReason) -> str:
    """The reason in words, such as "no blocks"; empty if there is none."""
    return "" if not reason else HoldReason.Name(reason).removeprefix("HOLD_REASON_").lower().replace("_", " ")
