"""What a watched page shows of the engines: one feed for all watchers of a router, a few messages a second.

It reads what Control tells: the load, and the trace of the last steps, each as far as the caller may see it. While
nothing watches, it asks an engine for nothing; while an engine is idle, for no trace.

A message is a list of ticks. A tick is made once for all callers that may see the same:

    {"at": seconds, "requests": …, "tenants": [[name, running, waiting, share], …], "num_tenants": …,
     "rates": [[age in seconds, output tokens, prompt tokens, [[ITL in ms, how often], …], [TTFT in ms, …]], …],
     "engines": [{"engine": 0, "running": …, "waiting": …, "hold": why the next in line waits,
                  "blocks": [total, free, evictable], "block_size": …, "preemptions": …, "epoch": …,
                  "columns": steps since the last tick,
                  "rows": [[sequence, state, prompt tokens, tokens, computed tokens, tenant, request id, cells], …],
                  "others": live sequences without a row}]}

Cells tell what a sequence did in each of these steps, a letter a step: `d` decode, `p` prefill, `w` waiting,
`x` preempted, `h` held (it runs, and computed nothing) and `.` for nothing. A state is one of these letters, or one of
the ends in `_ENDS`. Ticks that are older than the page's columns keep "at" and "rates" alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pagoda.v1 import control_pb2, trace_pb2

from ..engines.channel import EngineChannel
from ..errors import Unavailable
from ..telemetry.load_feed import MAX_WATCHERS, MAX_WRITES_A_SECOND, Places
from ..tenants.caller import Caller, Right, set_caller
from ..tenants.own_view import seen_load, seen_trace

log = logging.getLogger("pagoda.router")

INTERVAL_S = 0.25
HEARTBEAT_S = 1.0  # between ticks of an idle server, which find watchers that have gone
FIRST_S = 10.0  # of the trace, for the first watcher
OVERLAP_S = 0.25  # of two traces, at least: an engine answers between two steps, and looks back from then
TRACE_TIMEOUT_S = 2.0
KEEP_S = 60.0
KEEP_CELLS_S = 15.0
MAX_ROWS = 40
MAX_COLUMNS = 240

MoveKind = trace_pb2.MoveKind
Tick: TypeAlias = dict[str, Any]
Trace: TypeAlias = Sequence[trace_pb2.StepTracePart]

_ENDS = {
    MoveKind.MOVE_KIND_FINISHED: "finished",
    MoveKind.MOVE_KIND_ABORTED: "cancelled",
    MoveKind.MOVE_KIND_EXPIRED: "expired",
    MoveKind.MOVE_KIND_REJECTED: "rejected",
    MoveKind.MOVE_KIND_FAILED: "failed",
}

# -- one engine's trace ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Row:
    """A sequence.

    state    what it does, or did last
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
class _Rate:
    """Counts over an interval of time."""

    tokens: int = 0
    prompt_tokens: int = 0
    itl: Counter[float] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)


Rates: TypeAlias = dict[int, _Rate]  # by age, in intervals


class TraceReader:
    """Reads traces of one engine that overlap, each step once.

    Times to first token and between tokens come from here, not from the calls: it costs the calls nothing, several
    routers need not add up theirs, and a caller's own trace gives its own times.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._shown: dict[int, None] = {}
        self._gone: set[int] = set()  # sequences whose ends were told, while a trace still has them
        self._read_until = -math.inf
        # A run: consecutive steps that each computed one token for the same sequences. They are counted at once.
        self._run: tuple[int, ...] = ()
        self._run_steps = 0
        self._run_end = 0.0

    def read(self, parts: Sequence[trace_pb2.StepTracePart], rates: Rates) -> Tick:
        """The rows of a tick, with the cells of the steps that were not read before. Adds to `rates`."""
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
        columns: deque[tuple[dict[int, str], int]] = deque()
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
                rate = rates.setdefault(int((part.taken_at_s - step.end_s) / INTERVAL_S), _Rate())
                if self._count(step, ids, rate) and is_like_before:
                    column, times = columns.pop()
                    columns.append((column, times + 1))
                else:
                    columns.append((self._column(step, ids, shown), 1))
                num_columns += 1
                while num_columns > MAX_COLUMNS:
                    column, times = columns.popleft()
                    num_columns -= 1
                    if times > 1:
                        columns.appendleft((column, times - 1))
        self._end_run()
        for move in reversed(moves):
            self._apply(move, current)
        for move in current:
            row = self._rows[move.sequence]
            row.tokens = max(row.tokens, move.tokens)  # a start that is told again tells of that time
            row.computed = max(row.computed, move.computed_tokens)
        rows = [self._row(id, columns) for id in shown]
        self._drop_ended()
        return {"columns": num_columns, "rows": rows, "others": len(self._rows) - len(self._shown)}

    def _row(self, id: int, columns: Iterable[tuple[dict[int, str], int]]) -> list[Any]:
        row = self._rows[id]
        cells = "".join(column.get(id, ".") * times for column, times in columns)
        return [
            id,
            row.end or row.state,
            row.prompt_tokens,
            row.tokens,
            row.computed,
            row.tenant,
            row.request_id,
            cells,
        ]

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
        if len(self._shown) < MAX_ROWS:
            others = sorted(self._rows.keys() - self._shown.keys(), key=lambda id: (self._rows[id].state == "w", id))
            for id in others[: MAX_ROWS - len(self._shown)]:
                self._shown[id] = None
        return list(self._shown)

    def _apply(self, move: trace_pb2.TracedMove, current: list[trace_pb2.TracedMove]) -> None:
        """Note a move, unless an earlier trace had it. Adds moves that tell the latest numbers to `current`."""
        row = self._rows[move.sequence]
        if move.kind in _ENDS:
            row.end, row.ended = _ENDS[move.kind], move.at_s
            current.append(move)
        elif move.kind == MoveKind.MOVE_KIND_STARTED and (row.state not in "wx" or move.at_s <= row.moved):
            current.append(move)
        elif move.at_s > row.moved:
            if move.kind == MoveKind.MOVE_KIND_STARTED:
                row.state, row.computed = "h", move.computed_tokens
            elif move.kind == MoveKind.MOVE_KIND_PREEMPTED:
                row.state, row.computed = "x", 0
            row.moved = move.at_s

    def _column(self, step: trace_pb2.TracedStep, ids: tuple[int, ...], shown: list[int]) -> dict[int, str]:
        column = {
            id: row.idle_cell
            for id in shown
            if (row := self._rows[id]).arrived <= step.end_s and row.ended > step.end_s
        }
        num_decodes = len(ids) - len(step.chunk_lengths)
        for id, start in zip(ids, (*[math.inf] * num_decodes, *step.chunk_starts), strict=True):
            if (row_of := self._rows.get(id)) is not None and row_of.ended > step.start_s:
                # Behind the prompt, a chunk verifies drafts, or computes tokens that no step chose.
                column[id] = cell = "d" if start >= row_of.prompt_tokens else "p"
                if row_of.ended == math.inf:
                    row_of.state = cell
        return column

    # -- tokens and times -------------------------------------------------------------------------------------------

    def _count(self, step: trace_pb2.TracedStep, ids: tuple[int, ...], rate: _Rate) -> bool:
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

    def _emit(self, id: int, step: trace_pb2.TracedStep, rate: _Rate) -> None:
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


def _row_of(move: trace_pb2.TracedMove) -> _Row:
    # A move is noted after its step: the first token of a sequence that starts with it is counted already.
    tokens = move.tokens if move.tokens > move.prompt_tokens + 1 else move.prompt_tokens
    row = _Row(move.request_id, move.tenant, move.arrived_s, move.prompt_tokens, tokens, move.computed_tokens)
    if move.kind == MoveKind.MOVE_KIND_PREEMPTED:
        row.state = "x"
    return row


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


# -- the feed ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _View:
    """What callers see that may see the same.

    ticks    number, time, text and, for when its cells are out of the page, a shorter text of each; oldest first
    read_at  when the last trace of each engine was asked for that was read
    """

    caller: Caller
    watchers: int = 0
    ticks: deque[tuple[int, float, str, str]] = field(default_factory=deque)
    readers: dict[int, tuple[int, TraceReader]] = field(default_factory=dict)
    read_at: dict[int, float] = field(default_factory=dict)

    def reader(self, engine: int, epoch: int) -> TraceReader:
        """The reader of an engine's trace: another one once the engine was restarted."""
        if engine not in self.readers or self.readers[engine][0] != epoch:
            self.readers[engine] = (epoch, TraceReader())
        return self.readers[engine][1]

    def add(self, number: int, now: float, tick: Tick) -> None:
        brief = {"at": tick["at"], "rates": tick["rates"]}
        self.ticks.append((number, now, _compact(tick), _compact(brief)))
        while self.ticks[0][1] < now - KEEP_S:
            self.ticks.popleft()

    def is_worth_keeping(self, now: float) -> bool:
        return self.watchers > 0 or (len(self.ticks) > 0 and self.ticks[-1][1] >= now - KEEP_S)

    def after(self, number: int, now: float) -> str:
        """The ticks after the one with this number, as a list in JSON."""
        since = now - KEEP_CELLS_S
        found = [text if at >= since else brief for tick, at, text, brief in self.ticks if tick > number]
        return f"[{','.join(found)}]"


class LiveFeed:
    """Makes each tick once for all pages that watch, with the limits of WatchLoad.

    channels  to all engines
    load      makes the load of all routers
    """

    def __init__(self, channels: Sequence[EngineChannel], load: Callable[[], Awaitable[control_pb2.Load]]) -> None:
        self._channels = channels
        self._load = load
        self._places = Places("live", MAX_WATCHERS)
        self._views: dict[str | None, _View] = {}
        self._number = 0  # of the last tick
        self._made: asyncio.Future[None] | None = None  # ends with the next tick
        self._task: asyncio.Task[None] | None = None
        # Each engine's epoch and steps at its last trace, and when.
        self._read: dict[int, tuple[tuple[int, int], float]] = {}
        self._overlap_s: dict[int, float] = {}  # of the next two traces of each engine

    @property
    def place(self) -> Places:
        """A place for a watcher, to hold while it watches. Raises ResourceExhausted."""
        return self._places

    async def watch(self, caller: Caller) -> AsyncIterator[str]:
        """Messages for a caller, from what was told to others a minute ago on. Cancel it to end it."""
        view = self._view_of(caller)
        view.watchers += 1
        try:
            if self._task is None or self._task.done():
                self._made = asyncio.get_running_loop().create_future()
                self._task = asyncio.create_task(self._run())
            seen = 0
            while True:
                assert self._made is not None
                made = self._made
                if view.ticks and view.ticks[-1][0] > seen:
                    message = view.after(seen, time.monotonic())
                    seen = view.ticks[-1][0]
                    yield message
                else:
                    await asyncio.shield(made)
        finally:
            view.watchers -= 1

    def _view_of(self, caller: Caller) -> _View:
        now = time.monotonic()
        self._views = {name: view for name, view in self._views.items() if view.is_worth_keeping(now)}
        return self._views.setdefault(None if caller.may(Right.OBSERVE) else caller.tenant, _View(caller))

    async def _run(self) -> None:
        assert self._made is not None
        try:
            while views := [view for view in self._views.values() if view.watchers]:
                started = time.monotonic()
                await self._tick(views)
                self._made.set_result(None)
                self._made = asyncio.get_running_loop().create_future()
                interval_s = max(INTERVAL_S, self._places.taken / MAX_WRITES_A_SECOND)
                await asyncio.sleep(max(interval_s + started - time.monotonic(), INTERVAL_S / 2))
        except Exception as error:
            log.exception("the feed of the page ends")
            self._made.set_exception(error)

    async def _tick(self, views: Iterable[_View]) -> None:
        load = await self._load()
        now = time.monotonic()
        traces: list[Trace | None] = []
        for at, channel in enumerate(self._channels):
            read_at = min(view.read_at.get(at, -math.inf) for view in views)
            traces.append(trace := await self._trace(at, channel, now, read_at))
            if trace:
                for view in views:
                    view.read_at[at] = now
        self._number += 1
        for view in views:
            if any(traces) or not view.ticks or now - view.ticks[-1][1] >= HEARTBEAT_S:
                view.add(self._number, now, await self._tick_of(view, load, traces, now))

    async def _trace(self, at: int, channel: EngineChannel, now: float, read_at: float) -> Trace | None:
        """An engine's trace since `read_at`: empty if nothing is new in it, None if none reaches back that far."""
        load, info = channel.load, channel.info
        if info is None:
            return ()
        state = (info.epoch, load.steps)
        state_read, at_time = self._read.get(at, (None, -math.inf))
        if state == state_read and read_at >= at_time and not (load.running or load.waiting):
            return ()
        asked, overlap_s = time.monotonic(), self._overlap_s.get(at, OVERLAP_S)
        try:
            async with asyncio.timeout(TRACE_TIMEOUT_S):
                parts = await channel.trace(min(asked - read_at, FIRST_S) + overlap_s)
        except (Unavailable, TimeoutError):
            return None
        finally:
            late_s = time.monotonic() - asked
            self._overlap_s[at] = max(OVERLAP_S, 2 * late_s)
        if late_s > overlap_s:  # it looks back from so late that it may miss steps: the next tick asks for more
            return None
        self._read[at] = (state, now)
        return parts

    async def _tick_of(self, view: _View, load: control_pb2.Load, traces: Sequence[Trace | None], now: float) -> Tick:
        set_caller(view.caller)
        seen, rates = seen_load(load), Rates()
        engines = []
        for engine in seen.engines:
            shown: Tick = {"engine": engine.engine, "running": engine.running, "waiting": engine.waiting}
            if engine.blocks_total:
                shown["blocks"] = [engine.blocks_total, engine.blocks_free, engine.blocks_evictable]
                shown["preemptions"] = engine.preemptions
            info = self._channels[engine.engine].info
            if info is not None:
                shown |= {"epoch": f"{info.epoch:x}", "block_size": info.kv_cache.block_size}
                if parts := traces[engine.engine]:
                    own = [part async for part in seen_trace(parts)]
                    shown |= view.reader(engine.engine, info.epoch).read(own, rates)
                    shown["hold"] = _hold(own) if engine.waiting else ""
            engines.append(shown)
        return {
            "at": round(now, 3),
            "requests": seen.requests,
            "tenants": [[each.name, each.running, each.waiting, round(each.share, 3)] for each in seen.tenants],
            "num_tenants": seen.num_tenants,
            "rates": [
                [round(age * INTERVAL_S, 2), rate.tokens, rate.prompt_tokens, sorted(rate.itl.items()), rate.ttft]
                for age, rate in sorted(rates.items(), reverse=True)
            ],
            "engines": engines,
        }


def _hold(parts: Sequence[trace_pb2.StepTracePart]) -> str:
    steps = [part.steps[-1] for part in parts if part.steps]
    why = steps[-1].hold if steps else trace_pb2.HOLD_REASON_UNSPECIFIED
    return "" if not why else trace_pb2.HoldReason.Name(why).removeprefix("HOLD_REASON_").lower().replace("_", " ")


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
