"""The engine's end of the channel over gRPC: each call of Connect is a session with a router."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc

from ...channel.address import is_unix
from ...channel.link import MAX_MESSAGE_BYTES
from ...channel.listening import GrpcPort, channel_keepalive
from ...runtime.channel_trust import ENGINE_NAME, ChannelTrust, Trust
from .block_lender import BlockLender, Lent
from .codec import InvalidMessage
from .server import EngineServer

log = logging.getLogger("pagoda.engine")

SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # it is on by default, and two engines that share a port would steal each other's routers
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
HEALTH_OPTIONS = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 << 10)]
GRACE_S = 0.2
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PING_S = 1.0  # between two questions to the loop
REFUSED_EACH_S = 60.0  # a router tries again and again: its refusals are logged once in so many seconds

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
        self._writing.add_done_callback(lambda write: write.cancelled() or write.exception())  # or asyncio logs it
        try:
            await asyncio.shield(self._writing)
        except grpc.aio.BaseError as error:
            raise ConnectionError("the call is over") from error

    @property
    def is_sending(self) -> bool:
        return self._writing is not None and not self._writing.done()

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
    hang_timeout_s  the health service says NOT_SERVING while the engine's loop has not answered for so long, and while
                    the engine is going to end
    trust           what guards HOST:PORT
    lent            the layout of the blocks that it lends, their bytes, and the most of a call; None: it lends none
    health_address  where the health service alone listens, without a guard; None: nowhere
    """

    def __init__(
        self,
        address: str,
        server: EngineServer,
        hang_timeout_s: float,
        trust: ChannelTrust,
        lent: Lent | None = None,
        health_address: str | None = None,
    ) -> None:
        self.address = address  # with the actual port, once it listens
        self._engine = server
        self._hang_timeout_s = hang_timeout_s
        self._trust = trust
        self._offered: Trust | None = None  # whose certificates gRPC has
        self._refused_at = -REFUSED_EACH_S
        self._health = health.aio.HealthServicer()
        self._health_address = health_address
        self._lent = lent
        self._ports: list[GrpcPort] = []
        self._helpers: list[asyncio.Task[None]] = []
        self._sessions: set[asyncio.Future[Exception | None]] = set()
        self._is_stopping = False
        self._server = grpc.aio.server(options=[*SERVER_OPTIONS, *channel_keepalive(address)])
        self._health_server: grpc.aio.Server | None = None

    async def Connect(self, requests: AsyncIterator[engine_pb2.RouterMessage], context: Context) -> None:
        if not self._is_trusted(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid token of the channel is required")
        if ENGINE_NAME.encode() in context.auth_context().get("x509_subject_alternative_name", ()):
            why = f"a certificate of {ENGINE_NAME} makes no router"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        link = GrpcLink(requests, context)
        session = asyncio.ensure_future(self._engine.serve(link))
        self._sessions.add(session)
        session.add_done_callback(self._sessions.discard)
        try:
            await link.end(await session)
        except asyncio.CancelledError:
            if not self._is_stopping or link.is_sending:  # gRPC sends no status before the message, and then drops both
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine has stopped")

    def _is_trusted(self, context: grpc.aio.ServicerContext[Any, Any]) -> bool:
        if self._trust.current.accepts(context.invocation_metadata() or ()):
            return True
        if time.monotonic() - self._refused_at >= REFUSED_EACH_S:
            self._refused_at = time.monotonic()
            log.warning("refused a call without a valid token (--channel-token-file)")
        return False

    async def start(self) -> None:
        """Start listening. Raises OSError if the address cannot be bound."""
        engine_pb2_grpc.add_EngineServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._lent is not None:
            lender = BlockLender(self._engine.lend, self._lent, self._is_trusted)
            engine_pb2_grpc.add_BlocksServicer_to_server(lender, self._server)
        previous = os.umask(0o177) if is_unix(self.address) else None
        try:
            port = GrpcPort(self.address, self._add_port)
        finally:
            if previous is not None:
                os.umask(previous)
        self._ports.append(port)
        self.address = port.address
        await self._server.start()
        if self._health_address is not None:
            self._health_server = grpc.aio.server(options=HEALTH_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
            self._ports.append(GrpcPort(self._health_address, self._health_server.add_insecure_port))
            await self._health_server.start()
        self._helpers = [asyncio.create_task(self._watch()), asyncio.create_task(self._trust.follow(log))]

    def _add_port(self, address: str) -> int:
        if (first := self._new_certificates()) is None:
            return int(self._server.add_insecure_port(address))
        # gRPC asks for new ones at each handshake, from a thread of its own.
        credentials = grpc.dynamic_ssl_server_credentials(first, self._new_certificates, True)
        return int(self._server.add_secure_port(address, credentials))

    def _new_certificates(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates of the files, unless gRPC has them."""
        trust, certificates = self._trust.current, self._trust.current.certificates
        if trust is self._offered or certificates is None:
            return None
        self._offered = trust
        pair = (certificates.key, certificates.certificate)
        return grpc.ssl_server_certificate_configuration([pair], certificates.authorities)

    async def _watch(self) -> None:
        """Have the health service follow the loop, which makes the steps: other threads of a stuck engine answer on."""
        while True:
            answer = asyncio.ensure_future(self._engine.loop_answers())
            if (await asyncio.wait([answer], timeout=self._hang_timeout_s))[1]:
                log.error("the engine hangs: its loop has not answered for %.0f s", self._hang_timeout_s)
                await self._health.set("", NOT_SERVING)
            await answer
            is_serving = not self._engine.is_leaving
            await self._health.set("", health_pb2.HealthCheckResponse.SERVING if is_serving else NOT_SERVING)
            await asyncio.sleep(min(PING_S, self._hang_timeout_s / 32))

    async def stop(self) -> None:
        for helper in self._helpers:
            helper.cancel()
        for port in self._ports:
            port.close()
        servers = filter(None, (self._server, self._health_server))
        stopping = [asyncio.ensure_future(server.stop(2 * GRACE_S)) for server in servers]
        await asyncio.wait(stopping, timeout=GRACE_S)  # what the loop has sent last still reaches routers
        self._is_stopping = True
        for session in self._sessions:  # gRPC would cancel their calls, and log each with a traceback
            session.cancel()
        await asyncio.gather(*stopping)
