"""The engine's end of the channel: a gRPC stream for each router, on a Unix socket or TCP; one message a step out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from engine import loop as engine_loop
from engine.codec import PendingOutput, sequence_from_submit
from engine.errors import ConfigError
from engine.step_output import StepOutput
from protos import control_pb2, engine_pb2, engine_pb2_grpc

log = logging.getLogger("pagoda.engine")

STALL_TIMEOUT_S = 30.0  # a router that takes no message for this long is dropped
MAX_MESSAGE_BYTES = 64 << 20
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # on by default: two engines could share a port and steal each other's routers
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


class Connection:
    """One router. Lives on the event loop's thread."""

    def __init__(self) -> None:
        self.pending = PendingOutput()
        self.flushed: list[int] = []
        self.wake = asyncio.Event()
        self.ids: dict[int, int] = {}  # the router's sequence numbers → ours

    def tell(self, load: engine_loop.LoadSnapshot) -> None:
        self.pending.load = load
        self.wake.set()

    def take(self) -> PendingOutput:
        taken, self.pending = self.pending, PendingOutput()
        return taken


class EngineServicer(engine_pb2_grpc.EngineServicer):
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

    async def Connect(
        self,
        requests: AsyncIterator[engine_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[engine_pb2.RouterMessage, engine_pb2.EngineMessage],
    ) -> None:
        connection = Connection()
        self._connections.add(connection)
        if self._load is not None:
            connection.tell(self._load)
        log.info("router connected")
        reader = asyncio.create_task(self._read(connection, requests))
        writer = asyncio.create_task(self._write(connection, context))
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            reader.cancel()
            writer.cancel()
            self._drop(connection)
            log.info("router disconnected")

    async def _read(self, connection: Connection, requests: AsyncIterator[engine_pb2.RouterMessage]) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(connection, message.submit)
                case "abort":
                    known = [connection.ids[number] for number in message.abort.sequences if number in connection.ids]
                    self._put(engine_loop.Abort(known))
                case "flush_cache":
                    self._put(engine_loop.FlushCache(lambda freed: self._reply_flushed(connection, freed)))

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

    async def _write(
        self,
        connection: Connection,
        context: grpc.aio.ServicerContext[engine_pb2.RouterMessage, engine_pb2.EngineMessage],
    ) -> None:
        numbers = itertools.count()

        async def write(**message: object) -> None:
            async with asyncio.timeout(STALL_TIMEOUT_S):
                await context.write(
                    engine_pb2.EngineMessage(epoch=self._info.epoch, number=next(numbers), **message)  # type: ignore[arg-type]
                )

        await write(hello=self._info)
        while True:
            await connection.wake.wait()
            connection.wake.clear()
            await write(step=connection.take().to_message())
            while connection.flushed:
                await write(cache_flushed=engine_pb2.CacheFlushed(freed_blocks=connection.flushed.pop(0)))

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._put(engine_loop.Abort(list(connection.ids.values())))
        for id in connection.ids.values():
            del self._routes[id]
        connection.ids.clear()

    def _put(self, message: engine_loop.Message) -> None:
        assert self._inbox is not None, "attach() comes before serving"
        self._inbox.put(message)


def is_local(listen: str) -> bool:
    """A Unix socket or a loopback address."""
    host = listen.rpartition(":")[0].strip("[]")
    return listen.startswith("unix:") or host == "localhost" or host == "::1" or host.startswith("127.")


async def start_server(servicer: EngineServicer, listen: str) -> grpc.aio.Server:
    """Binds unix:PATH (its owner's alone) or HOST:PORT and starts serving. Raises ConfigError if it cannot."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    await health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    unix_path = listen.removeprefix("unix:") if listen.startswith("unix:") else None
    previous = os.umask(0o177) if unix_path else None
    try:
        server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigError(f"--listen: cannot bind {listen}") from error
    finally:
        if previous is not None:
            os.umask(previous)
    await server.start()
    return server
