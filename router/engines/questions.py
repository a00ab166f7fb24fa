"""What a router has asked of an engine beside requests, and the engine has not answered yet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import trace_pb2

from ..errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PagodaError,
    ResourceExhausted,
    Unavailable,
)
from .held_adapters import Adapter, HeldAdapters

RETRY_FULL_S = 60.0  # no place gets free by itself: Pagoda's clients do not repeat a call after so long


class Questions:
    """Flushes of the prefix cache, step traces, and adapters to load and unload.

    post  sends a message. Raises Unavailable unless the engine is ready
    held  what the engine holds, which follows its answers at once: its next report may be later than they are
    """

    def __init__(self, post: Callable[[engine_pb2.RouterMessage], None], held: HeldAdapters) -> None:
        self._post, self._held = post, held
        self._flushes: list[asyncio.Future[int]] = []
        self._tracing = asyncio.Lock()  # one at a time: a trace may take megabytes
        self._next_trace = itertools.count()
        self._traces: dict[int, asyncio.Queue[engine_pb2.Trace | None]] = {}  # None: the engine is lost
        self._next_adapter = itertools.count()
        self._adapters: dict[int, tuple[engine_pb2.RouterMessage, asyncio.Future[Adapter]]] = {}

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

    async def load_adapter(
        self, name: str, path: str, *, is_pinned: bool = False, identity: bytes = b"", keeps_other: bool = False
    ) -> Adapter:
        """Have the engine hold an adapter under this name; return it.

        identity     the only one that it may have; empty: any
        keeps_other  refuse a name that means an adapter with another identity

        Raises Unavailable if the engine is lost or not ready, and what `fault_of` returns.
        """
        number = next(self._next_adapter)
        load = engine_pb2.LoadAdapter(
            number=number, name=name, path=path, is_pinned=is_pinned, identity=identity, keeps_other=keeps_other
        )
        return await self._ask_for_adapter(number, engine_pb2.RouterMessage(load_adapter=load))

    async def unload_adapter(self, name: str) -> Adapter:
        """Have the engine forget an adapter; return what it has held. Raises what `load_adapter` does."""
        number = next(self._next_adapter)
        unload = engine_pb2.UnloadAdapter(number=number, name=name)
        return await self._ask_for_adapter(number, engine_pb2.RouterMessage(unload_adapter=unload))

    async def _ask_for_adapter(self, number: int, message: engine_pb2.RouterMessage) -> Adapter:
        self._post(message)
        reply: asyncio.Future[Adapter] = asyncio.get_running_loop().create_future()
        self._adapters[number] = message, reply
        return await reply

    def adapter_answered(self, answer: engine_pb2.AdapterAnswer) -> None:
        if answer.number not in self._adapters:
            return
        asked, reply = self._adapters.pop(answer.number)
        if answer.HasField("adapter"):
            adapter = Adapter.of(answer.adapter)
            self._held.change(adapter, is_gone=asked.HasField("unload_adapter"))
            if not reply.done():
                reply.set_result(adapter)
        elif not reply.done():
            reply.set_exception(fault_of(answer.error))

    def lose(self) -> None:
        """Fail every question: the engine is lost."""
        for flush in self._flushes:
            if not flush.done():
                flush.set_exception(Unavailable("the engine was lost"))
        self._flushes.clear()
        for _, reply in self._adapters.values():
            if not reply.done():
                reply.set_exception(Unavailable("the engine was lost"))
        self._adapters.clear()
        for parts in self._traces.values():
            parts.put_nowait(None)


def fault_of(error: engine_pb2.AdapterError) -> PagodaError:
    """The error of a call that an engine's answer ends."""
    detail = "".join(letter if letter.isprintable() else " " for letter in error.detail)  # logs show it, too
    match error.fault:
        case engine_pb2.ADAPTER_FAULT_NOT_FOUND:
            return NotFound(f"lora_path: {detail}")
        case engine_pb2.ADAPTER_FAULT_INVALID:
            return InvalidArgument("lora_path", detail)
        case engine_pb2.ADAPTER_FAULT_FULL:
            return ResourceExhausted(detail, reason="ADAPTERS_FULL", retry_after_s=RETRY_FULL_S)
        case engine_pb2.ADAPTER_FAULT_TAKEN:
            return AlreadyExists(f"lora_name: {detail}")
        case _:
            return FailedPrecondition(detail)
