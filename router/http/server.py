"""The HTTP port: a server in the router's event loop, for the routes that the other files of this room make."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ...channel.address import host_of
from ..errors import ConfigError
from .acceptor import PARSING_S, Acceptor, Pace
from .connection import IDLE_S, Connection

SEND_BUFFER_BYTES = 128 << 10  # in the kernel, which holds megabytes for a client that does not read by default
LAST_IDLE_S = 2.0  # in which a client may send its last request, when a port is left
_HEADERS = [
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
]


class HttpPort:
    """A bound HTTP port, which serves while `run` runs.

    listen            HOST:PORT; port 0 takes a free one
    shares_port       whether other processes listen there too
    tls               None: connections are not encrypted
    stall_s           how long a client may read nothing before its connection is closed
    are_streams_late  whether tokens have waited for too long to be written, so that everything new has to wait

    Raises ConfigError if the address cannot be bound.
    """

    def __init__(
        self,
        listen: str,
        app: ASGIApp,
        *,
        shares_port: bool,
        tls: ssl.SSLContext | None,
        stall_s: float,
        are_streams_late: Callable[[], bool] = lambda: False,
    ) -> None:
        host, _, port = listen.rpartition(":")
        self._socket = _bound(listen, host_of(listen), int(port), shares_port)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self.url = f"{'http' if tls is None else 'https'}://{self.address}"
        connection: Any = partial(Connection, stall_s=stall_s, pace=Pace(PARSING_S, are_streams_late))
        config = uvicorn.Config(
            app, http=connection, lifespan="off", ws="none", log_config=None, log_level="critical", access_log=False,
            server_header=False, headers=_HEADERS, proxy_headers=False, timeout_keep_alive=IDLE_S,
        )  # fmt: skip
        config.load()
        config.ssl = tls
        self._server = _Server(config, are_streams_late)
        self._has_ended = asyncio.Event()

    async def run(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._has_ended.set()

    async def leave(self, grace_s: float) -> None:
        """Accept no more connections, because others listen here too, and serve those that are open.

        Answers that begin from now on announce that the connection closes; a client whose answer has begun
        may send one more request. This returns when no connection is left, or after the grace period.
        """
        self._server.config.encoded_headers.append((b"connection", b"close"))  # it takes effect within a second
        for acceptor in self._server.servers:
            acceptor.close()
        idle_since: dict[Connection, float] = {}
        deadline = time.monotonic() + grace_s
        await asyncio.sleep(LAST_IDLE_S)  # connections that have just been accepted are not known yet
        while (left := self._server.server_state.connections) and (now := time.monotonic()) < deadline:
            for connection in list(left):
                assert isinstance(connection, Connection), "no other protocol is spoken here"
                if not connection.is_idle:
                    idle_since.pop(connection, None)
                elif now - idle_since.setdefault(connection, now) > LAST_IDLE_S:
                    connection.transport.close()
            await asyncio.sleep(0.1)

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
    def __init__(self, config: uvicorn.Config, are_streams_late: Callable[[], bool]) -> None:
        super().__init__(config)
        self._are_streams_late = are_streams_late

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # the router has its own handlers
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        accepts = partial(Acceptor, make_protocol=self._connection, tls=self.config.ssl)
        self.servers = [accepts(each, are_streams_late=self._are_streams_late) for each in sockets or ()]  # type: ignore[misc]

    def _connection(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        connection: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection


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
