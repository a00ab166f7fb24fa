"""The HTTP port: a server in the router's event loop, for the routes that the other files of this room make."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagoda_server.channel.address import host_of
from pagoda_server.router.errors import ConfigError

# Seconds that a client has. They differ, because a change from one to another starts a time.
HEADERS_S = 10.0  # to send a request's headers in, once the connection is open or the first byte has come
IDLE_S = 75  # to send the next request in; longer than a load balancer's minute, which would otherwise lose the race
LINGER_S = 5.0  # to send the rest of a body whose request has been answered
MAX_HEADER_BYTES = 32 << 10
SEND_BUFFER_BYTES = 128 << 10  # in the kernel, which holds megabytes for a client that does not read by default
WRITE_BUFFER_BYTES = 16 << 10  # beyond it, a handler waits until the client has read
# gRPC and the engine keep half of the files that this process may open.
MAX_CONNECTIONS = min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
_HEADERS = [
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
]


class HttpPort:
    """A bound HTTP port, which serves while `run` runs.

    listen       HOST:PORT; port 0 takes a free one
    shares_port  whether other processes listen there too
    tls          None: connections are not encrypted
    stall_s      how long a client may read nothing before its connection is closed

    Raises ConfigError if the address cannot be bound.
    """

    def __init__(
        self, listen: str, app: ASGIApp, *, shares_port: bool, tls: ssl.SSLContext | None, stall_s: float
    ) -> None:
        host, _, port = listen.rpartition(":")
        self._socket = _bound(listen, host_of(listen), int(port), shares_port)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self.url = f"{'http' if tls is None else 'https'}://{self.address}"
        config = uvicorn.Config(
            app, http=partial(Connection, stall_s=stall_s), lifespan="off", ws="none",  # type: ignore[arg-type]
            log_config=None, log_level="critical", access_log=False, server_header=False, headers=_HEADERS,
            proxy_headers=False, timeout_keep_alive=IDLE_S, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )  # fmt: skip
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._has_ended = asyncio.Event()

    async def run(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._has_ended.set()

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, and let answers end within the grace period; then cancel them."""
        self._server.should_exit = True
        try:
            async with asyncio.timeout(grace_s):
                await self._has_ended.wait()
        except TimeoutError:
            self._server.force_exit = True
            tasks = list(self._server.server_state.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # the router has its own handlers
        yield


class Connection(H11Protocol):
    """A client's connection. It is closed when the client takes too long to send, or to read what waits for it.

    stall_s  how long the client may read nothing
    """

    def __init__(self, *arguments: Any, stall_s: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._stall_s = stall_s
        self._limit_s = 0.0  # for what the client has to do now; 0: it is the handler's turn
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._expect(HEADERS_S)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(0)
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Give the client its time for what it has to do now."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if (self.flow.write_paused or is_answered) and (waiting := self.transport.get_write_buffer_size()):
            if self._limit_s != self._stall_s:
                self._expect(self._stall_s, waiting)
        elif self.transport.is_closing() or (is_answered and self.conn.their_state is h11.SEND_BODY):
            self._expect(LINGER_S)
        elif self.conn.their_state is h11.IDLE:
            self._expect(HEADERS_S if self.conn.trailing_data[0] or self.cycle is None else IDLE_S)
        else:
            self._expect(0)

    def _expect(self, limit_s: float, waiting: int = 0) -> None:
        """Close the connection when this time has passed. A time that runs already goes on.

        waiting  bytes that the client has not read; it has the time again if it reads some
        """
        if limit_s == self._limit_s:
            return
        self._limit_s = limit_s
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(limit_s, self._expire, waiting) if limit_s else None

    def _expire(self, waiting: int) -> None:
        if waiting and self.transport.get_write_buffer_size() != waiting:
            self._limit_s = 0
            self._watch()
        else:
            self.transport.abort()


def _bound(listen: str, host: str, port: int, shares_port: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        bound.listen(2048)
        return bound
    except OSError as error:
        raise ConfigError(f"--http: cannot bind {listen}: {error.strerror or error}") from error
