"""What a watched page shows of the engines: one feed for all watchers of a router, a few messages a second.

It reads what Control knows: the load, and the trace of the last steps, each as far as the caller may see it. While
nothing watches, it asks an engine for nothing; while an engine is idle, for no trace.

A message is a list of ticks. A tick is made once for all callers that may see the same:

    {"at": seconds, "requests": …, "tenants": [[name, running, waiting, share], …], "num_tenants": …,
     "rates": [[age in seconds, output tokens, prompt tokens, [[ITL in ms, how often], …], [TTFT in ms, …]], …],
     "engines": [{"engine": 0, "name": …, "node": its machine, if that is known,
                  "running": …, "waiting": …, "hold": why the next in line waits,
                  "blocks": [total, free, evictable], "block_size": …, "preemptions": …, "epoch": …,
                  "adapters": [[name, this router's running requests, its waiting ones], …],
                  "columns": steps since the last tick,
                  "rows": [[sequence, state, prompt tokens, tokens, computed tokens, tenant, request id, cells], …],
                  "others": live sequences without a row}]}

Cells show what a sequence did in each of these steps, a letter a step as in `Column`, and `.` for nothing. A state is
one of these letters, or one of the ends in `trace_reader.ENDS`. Ticks that are older than the page's columns keep "at"
and "rates" alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pagoda.v1 import control_pb2, trace_pb2

from ..engines.channel import EngineChannel
from ..engines.fleet import Fleet
from ..errors import Unavailable
from ..telemetry.load_feed import MAX_WATCHERS, MAX_WRITES_A_SECOND, Places
from ..telemetry.trace_reader import INTERVAL_S, Rates, Reading, TraceReader, hold_name
from ..tenants.caller import Caller, Right, set_caller
from ..tenants.own_view import seen_load, seen_trace

log = logging.getLogger("pagoda.router")

HEARTBEAT_S = 1.0  # between ticks of an idle server, which find watchers that have gone
FIRST_S = 10.0  # of the trace, for the first watcher
OVERLAP_S = 0.25  # of two traces, at least: an engine answers between two steps, and looks back from then
TRACE_TIMEOUT_S = 2.0
KEEP_S = 60.0
KEEP_CELLS_S = 15.0
MAX_ROWS = 40
MAX_ADAPTERS = 40  # of an engine
MAX_COLUMNS = 240
Tick: TypeAlias = dict[str, Any]
Trace: TypeAlias = Sequence[trace_pb2.StepTracePart]

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
            self.readers[engine] = (epoch, TraceReader(MAX_ROWS, MAX_COLUMNS))
        return self.readers[engine][1]

    def forget_others(self, engines: Collection[int]) -> None:
        """Forget what is known of engines that have left."""
        for number in self.readers.keys() - engines:
            del self.readers[number]
        for number in self.read_at.keys() - engines:
            del self.read_at[number]

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

    load  makes the load of all routers
    """

    def __init__(self, fleet: Fleet, load: Callable[[], Awaitable[control_pb2.Load]]) -> None:
        self._fleet = fleet
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
        """Messages for a caller, beginning with what others got up to a minute ago. Cancel it to end it."""
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
        traces: dict[int, Trace | None] = {}
        for channel in list(self._fleet.channels):  # others may join meanwhile
            number = channel.number
            read_at = min(view.read_at.get(number, -math.inf) for view in views)
            traces[number] = trace = await self._trace(channel, now, read_at)
            if trace:
                for view in views:
                    view.read_at[number] = now
        self._number += 1
        for view in views:
            view.forget_others(traces)
            if any(traces.values()) or not view.ticks or now - view.ticks[-1][1] >= HEARTBEAT_S:
                view.add(self._number, now, await self._tick_of(view, load, traces, now))

    async def _trace(self, channel: EngineChannel, now: float, read_at: float) -> Trace | None:
        """An engine's trace since `read_at`: empty if nothing is new in it, None if none reaches back that far."""
        at, load, info = channel.number, channel.sequences.load, channel.info
        if info is None:
            return ()
        state = (info.epoch, load.steps)
        state_read, at_time = self._read.get(at, (None, -math.inf))
        if state == state_read and read_at >= at_time and not (load.running or load.waiting):
            return ()
        asked, overlap_s = time.monotonic(), self._overlap_s.get(at, OVERLAP_S)
        try:
            async with asyncio.timeout(TRACE_TIMEOUT_S):
                parts = await channel.questions.trace(min(asked - read_at, FIRST_S) + overlap_s)
        except (Unavailable, TimeoutError):
            return None
        finally:
            late_s = time.monotonic() - asked
            self._overlap_s[at] = max(OVERLAP_S, 2 * late_s)
        if late_s > overlap_s:  # it looks back from so late that it may miss steps: the next tick asks for more
            return None
        self._read[at] = (state, now)
        return parts

    async def _tick_of(self, view: _View, load: control_pb2.Load, traces: dict[int, Trace | None], now: float) -> Tick:
        set_caller(view.caller)
        seen, rates = seen_load(load), Rates()
        engines = []
        for engine in seen.engines:
            shown: Tick = {
                "engine": engine.engine,
                "name": engine.name,
                "running": engine.running,
                "waiting": engine.waiting,
            }
            if engine.blocks_total:
                shown["blocks"] = [engine.blocks_total, engine.blocks_free, engine.blocks_evictable]
                shown["preemptions"] = engine.preemptions
            channel = self._fleet.find(engine.engine)
            if channel is not None and (adapters := _adapters(channel, view.caller)):
                shown["adapters"] = adapters
            if channel is not None and (info := channel.info) is not None:
                shown |= {"epoch": f"{info.epoch:x}", "block_size": info.kv_cache.block_size}
                if engine.name and (node := info.settings.get("node")):  # a caller that may not observe sees no names
                    shown["node"] = node
                if parts := traces.get(engine.engine):
                    own = [part async for part in seen_trace(parts)]
                    shown |= page_rows(view.reader(engine.engine, info.epoch).read(own, rates))
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


def page_rows(reading: Reading) -> Tick:
    """The rows of an engine, and how many columns their cells have."""
    rows = []
    for id, row in reading.rows.items():
        cells = "".join(column.cells.get(id, ".") * column.steps for column in reading.columns)
        numbers = (row.prompt_tokens, row.tokens, row.computed)
        rows.append([id, row.end or row.state, *numbers, row.tenant, row.request_id, cells])
    return {"columns": sum(column.steps for column in reading.columns), "rows": rows, "others": reading.num_others}


def _adapters(channel: EngineChannel, caller: Caller) -> list[tuple[str, int | None, int | None]]:
    """The adapters that an engine holds and the caller may name, the most used first.

    How many requests run and wait with each is for callers that may observe.
    """
    running, waiting = channel.sequences.adapters()
    held = [each for each in (channel.held.by_name or {}).values() if caller.may_name(each.name)]
    if not caller.may(Right.OBSERVE):
        return [(each.name, None, None) for each in held[:MAX_ADAPTERS]]
    held.sort(key=lambda each: running[each.identity] + waiting[each.identity], reverse=True)
    return [(each.name, running[each.identity], waiting[each.identity]) for each in held[:MAX_ADAPTERS]]


def _hold(parts: Sequence[trace_pb2.StepTracePart]) -> str:
    return next((hold_name(part.steps[-1].hold) for part in reversed(parts) if part.steps), "")


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
