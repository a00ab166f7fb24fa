"""The engine's end of the channel over gRPC: each call of Connect is a session with a router."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc

from ...channel.address import is_unix
from ...channel.link import MAX_MESSAGE_BYTES
from ...channel.listening import GrpcPort, channel_keepalive
from .codec import InvalidMessage
from .server import EngineServer

log = logging.getLogger("pagoda.engine")

SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # it is on by default, and two engines that share a port would steal each other's routers
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
GRACE_S = 0.2
PING_S = 1.0  # between two questions to the loop

Context: TypeAlias = grpc.aio.ServicerContext[engine_pb2.RouterMessage, engine_pb2.EngineMessage]


class GrpcLink:
    """The engine's end of one call of Connect, which is a session; a Link."""

    def __init__(self, requests: AsyncIterator[engine_pb2.RouterMessage], context: Context) -> None:
        self._requests = aiter(requests)
        self._context = context
        self._writing: asyncio.Future[None] | None = None

    async def read(self) -> engine_pb2.RouterMessage | None:
        return await anext(self._requests, None)

    async def write(self, message: engine_pb2.EngineMessage) -> None:
        self._writing = asyncio.ensure_future(self._context.write(message))
        try:
            await asyncio.shield(self._writing)
        except grpc.aio.BaseError as error:
            raise ConnectionError("the call is over") from error

    @property
    def is_free(self) -> bool:
        return False

    def try_write(self, message: engine_pb2.EngineMessage) -> bool:
        return False

    async def end(self, error: Exception | None) -> None:
        """End the call with the reason why the router is dropped, if it is.

        gRPC cannot end a call while it sends a message: the call would stay open. So this waits for a write whose
        caller was cancelled; it ends when the router reads it or goes.
        """
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if error is not None:
            is_wrong = isinstance(error, InvalidMessage)
            code = grpc.StatusCode.INVALID_ARGUMENT if is_wrong else grpc.StatusCode.ABORTED
            await self._context.abort(code, f"the engine has dropped this router: {error or type(error).__name__}")

    def close(self) -> None:
        """Do nothing: the call ends with its handler."""


class GrpcServer(engine_pb2_grpc.EngineServicer):
    """
    address         HOST:PORT, or unix:PATH for a socket that only its owner may use
    server          runs the sessions; it returns why it has dropped a router, or None, and the call ends then
    hang_timeout_s  while the engine's loop has not answered for so long, the health service says NOT_SERVING
    """

    def __init__(self, address: str, server: EngineServer, hang_timeout_s: float) -> None:
        self._address = address
        self._engine = server
        self._hang_timeout_s = hang_timeout_s
        self._health = health.aio.HealthServicer()
        self._watching: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(options=[*SERVER_OPTIONS, *channel_keepalive(address)])

    async def Connect(self, requests: AsyncIterator[engine_pb2.RouterMessage], context: Context) -> None:
        link = GrpcLink(requests, context)
        await link.end(await self._engine.serve(link))

    async def start(self) -> None:
        """Start listening. Raises OSError if the address cannot be bound."""
        engine_pb2_grpc.add_EngineServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        previous = os.umask(0o177) if is_unix(self._address) else None
        try:
            self._port = GrpcPort(self._address, self._server.add_insecure_port)
        finally:
            if previous is not None:
                os.umask(previous)
        await self._server.start()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Have the health service follow the loop, which makes the steps: other threads of a stuck engine answer on."""
        while True:
            answer = asyncio.ensure_future(self._engine.loop_answers())
            if (await asyncio.wait([answer], timeout=self._hang_timeout_s))[1]:
                log.error("the engine hangs: its loop has not answered for %.0f s", self._hang_timeout_s)
                await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            await answer
            await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
            await asyncio.sleep(min(PING_S, self._hang_timeout_s / 32))

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._port.close()
        await self._server.stop(grace=GRACE_S)
