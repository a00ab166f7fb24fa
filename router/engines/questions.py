"""What a router has asked of an engine beside requests, and the engine has not answered yet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import trace_pb2

from ..errors import Unavailable


class Questions:
    """Flushes of the prefix cache, and step traces.

    post  sends a message. Raises Unavailable unless the engine is ready
    """

    def __init__(self, post: Callable[[engine_pb2.RouterMessage], None]) -> None:
        self._post = post
        self._flushes: list[asyncio.Future[int]] = []
        self._tracing = asyncio.Lock()  # one at a time: a trace may take megabytes
        self._next_trace = itertools.count()
        self._traces: dict[int, asyncio.Queue[engine_pb2.Trace | None]] = {}  # None: the engine is lost

    async def flush_cache(self) -> int:
        """Empty the prefix cache; returns the blocks that it freed. Raises Unavailable unless the engine is ready."""
        self._post(engine_pb2.RouterMessage(flush_cache=engine_pb2.FlushCache()))
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes.append(reply)
        return await reply

    def flushed(self, answer: engine_pb2.CacheFlushed) -> None:
        if self._flushes and not (flush := self._flushes.pop(0)).done():  # done: its call was cancelled
            flush.set_result(answer.freed_blocks)

    async def trace(self, last_s: float | None) -> list[trace_pb2.StepTracePart]:
        """The step trace of the last `last_s` seconds; None: all of it. Raises Unavailable without a ready engine."""
        async with self._tracing:
            number = next(self._next_trace)
            take = engine_pb2.TakeTrace(number=number, last_s=last_s)
            self._post(engine_pb2.RouterMessage(take_trace=take))
            traces = self._traces[number] = asyncio.Queue()
            try:
                parts: list[trace_pb2.StepTracePart] = []
                while (trace := await traces.get()) is not None:
                    parts.append(trace.part)
                    if trace.is_last:
                        return parts
                raise Unavailable("the engine was lost")
            finally:
                del self._traces[number]

    def traced(self, trace: engine_pb2.Trace) -> None:
        if parts := self._traces.get(trace.number):
            parts.put_nowait(trace)

    def lose(self) -> None:
        """Fail every question: the engine is lost."""
        for flush in self._flushes:
            if not flush.done():
                flush.set_exception(Unavailable("the engine was lost"))
        self._flushes.clear()
        for parts in self._traces.values():
            parts.put_nowait(None)
