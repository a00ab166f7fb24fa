"""The engine's end of the channel: a session for each router, over whatever link it came; one message a step out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeAlias

from channel.link import Link
from engine import loop as engine_loop
from engine.codec import PendingOutput, sequence_from_submit
from engine.step_output import StepOutput
from engine.step_trace import TraceSnapshot
from engine.trace_codec import trace_messages
from protos import control_pb2, engine_pb2

log = logging.getLogger("pagoda.engine")

STALL_TIMEOUT_S = 30.0  # a router that takes no message for this long is dropped

RouterLink: TypeAlias = Link[engine_pb2.RouterMessage, engine_pb2.EngineMessage]


class Connection:
    """One router. Lives on the event loop's thread."""

    def __init__(self) -> None:
        self.pending = PendingOutput()
        self.flushed: list[int] = []
        self.traces: list[Iterator[engine_pb2.Trace]] = []
        self.wake = asyncio.Event()
        self.ids: dict[int, int] = {}  # the router's sequence numbers → ours

    def tell(self, load: engine_loop.LoadSnapshot) -> None:
        self.pending.load = load
        self.wake.set()

    def take(self) -> PendingOutput:
        taken, self.pending = self.pending, PendingOutput()
        return taken


class EngineServer:
    """Names each router's sequences for the loop, and sorts each step's output by router."""

    def __init__(self, info: control_pb2.EngineInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._info = info
        self._clock = clock
        self._inbox: engine_loop.Inbox | None = None
        self._events = asyncio.get_running_loop()
        self._next_id = itertools.count()
        self._routes: dict[int, tuple[Connection, int]] = {}  # our sequence id → router, its number
        self._connections: set[Connection] = set()
        self._load: engine_loop.LoadSnapshot | None = None  # as of the last step

    def attach(self, inbox: engine_loop.Inbox) -> None:
        self._inbox = inbox

    # -- from the loop ----------------------------------------------------------------------------------------------

    def send(self, output: StepOutput, load: engine_loop.LoadSnapshot) -> None:
        with suppress(RuntimeError):  # the event loop has closed: nobody is left to tell
            self._events.call_soon_threadsafe(self._deliver, output, load)

    def _deliver(self, output: StepOutput, load: engine_loop.LoadSnapshot) -> None:
        for id, token, logprobs in zip(output.sequences, output.tokens, output.logprobs, strict=True):
            if route := self._routes.get(id):
                pending = route[0].pending
                if logprobs is not None:
                    pending.logprobs.append((len(pending.tokens), logprobs))
                pending.sequences.append(route[1])
                pending.tokens.append(token)
        for ended in output.ended:
            if route := self._routes.pop(ended.seq.id, None):
                connection, number = route
                del connection.ids[number]
                connection.pending.ended.append((number, ended))
        self._load = load
        for connection in self._connections:
            connection.tell(load)

    # -- from a router ----------------------------------------------------------------------------------------------

    async def serve(self, link: RouterLink) -> None:
        """A session: until the router is gone, or breaks the rules, or takes no message for too long."""
        connection = Connection()
        self._connections.add(connection)
        if self._load is not None:
            connection.tell(self._load)
        log.info("router connected")
        tasks = [asyncio.create_task(self._read(connection, link)), asyncio.create_task(self._write(connection, link))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._drop(connection)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    log.warning("dropped a router: %s", result or type(result).__name__)
            log.info("router disconnected")

    async def _read(self, connection: Connection, link: RouterLink) -> None:
        while (message := await link.read()) is not None:
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(connection, message.submit)
                case "abort":
                    known = [connection.ids[number] for number in message.abort.sequences if number in connection.ids]
                    self._put(engine_loop.Abort(known))
                case "flush_cache":
                    self._put(engine_loop.FlushCache(lambda freed: self._reply_flushed(connection, freed)))
                case "take_trace":
                    self._take_trace(connection, message.take_trace)

    def _submit(self, connection: Connection, submit: engine_pb2.Submit) -> None:
        now = self._clock()
        for index in range(submit.sampling.n or 1):
            id, number = next(self._next_id), submit.first_sequence + index
            if number in connection.ids:
                log.warning("the router used a live sequence number again; dropped")
                continue
            self._routes[id] = (connection, number)
            connection.ids[number] = id
            self._put(engine_loop.Add(sequence_from_submit(submit, index, id, now)))

    def _reply_flushed(self, connection: Connection, freed: int) -> None:
        def reply() -> None:
            connection.flushed.append(freed)
            connection.wake.set()

        self._events.call_soon_threadsafe(reply)

    def _take_trace(self, connection: Connection, take: engine_pb2.TakeTrace) -> None:
        def reply(snapshot: TraceSnapshot) -> None:
            self._events.call_soon_threadsafe(write, snapshot)

        def write(snapshot: TraceSnapshot) -> None:
            connection.traces.append(trace_messages(take.number, snapshot))
            connection.wake.set()

        self._put(engine_loop.TakeTrace(take.request.last_s if take.request.HasField("last_s") else math.inf, reply))

    async def _write(self, connection: Connection, link: RouterLink) -> None:
        numbers = itertools.count()

        async def write(**message: object) -> None:
            try:
                async with asyncio.timeout(STALL_TIMEOUT_S):
                    await link.write(
                        engine_pb2.EngineMessage(epoch=self._info.epoch, number=next(numbers), **message)  # type: ignore[arg-type]
                    )
            except TimeoutError:
                raise TimeoutError(f"it took no message for {STALL_TIMEOUT_S:.0f} s") from None

        await write(hello=self._info)
        while True:
            await connection.wake.wait()
            connection.wake.clear()
            if not connection.pending.is_empty:
                await write(step=connection.take().to_message())
            while connection.flushed:
                await write(cache_flushed=engine_pb2.CacheFlushed(freed_blocks=connection.flushed.pop(0)))
            if connection.traces:  # one part at a time: tokens do not wait for a whole trace
                if (part := next(connection.traces[0], None)) is None:
                    del connection.traces[0]
                else:
                    await write(trace=part)
                connection.wake.set()

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._put(engine_loop.Abort(list(connection.ids.values())))
        for id in connection.ids.values():
            del self._routes[id]
        connection.ids.clear()

    def _put(self, message: engine_loop.Message) -> None:
        assert self._inbox is not None, "attach() comes before serving"
        self._inbox.put(message)
