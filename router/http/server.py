"""The HTTP port: a server in the router's event loop, for the routes that the other files of this room make."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from pagoda_server.channel.address import host_of
from pagoda_server.router.errors import ConfigError


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # the router has its own handlers
        yield


class HttpPort:
    """A bound HTTP port, which serves while `run` runs.

    listen       HOST:PORT; port 0 takes a free one
    shares_port  whether other processes listen there too

    Raises ConfigError if the address cannot be bound.
    """

    def __init__(self, listen: str, routes: Sequence[BaseRoute], shares_port: bool) -> None:
        host, _, port = listen.rpartition(":")
        self._socket = _bound(listen, host_of(listen), int(port), shares_port)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            Starlette(routes=routes), lifespan="off", ws="none", log_config=None, access_log=False, server_header=False,
            proxy_headers=False,
        )  # fmt: skip
        self._server = _Server(config)

    async def run(self) -> None:
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Accept no more connections, and let `run` end once the calls have ended."""
        self._server.should_exit = True


def _bound(listen: str, host: str, port: int, shares_port: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        bound.listen(2048)
        return bound
    except OSError as error:
        raise ConfigError(f"--http: cannot bind {listen}: {error.strerror or error}") from error
