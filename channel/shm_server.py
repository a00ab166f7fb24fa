"""The listening side of the shared-memory channel: a session for every router that connects."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Generic

from pagoda_server.channel import shm_socket
from pagoda_server.channel.address import socket_file
from pagoda_server.channel.shm_link import Incoming, Outgoing, ShmLink
from pagoda_server.channel.socket_file import SocketFile

log = logging.getLogger("pagoda.channel")

_RETRY_S = 1.0  # no descriptors left: what other sessions give back may help


class ShmServer(Generic[Incoming, Outgoing]):
    """
    address  shm:PATH or shm:@NAME
    parse    bytes to a router's message; raises protobuf's DecodeError
    serve    runs a session; its end closes the link, its errors end nothing else
    """

    def __init__(
        self,
        address: str,
        parse: Callable[[bytes], Incoming],
        serve: Callable[[ShmLink[Incoming, Outgoing]], Awaitable[None]],
    ) -> None:
        self._address = address
        self._parse = parse
        self._serve = serve
        self._sessions: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises OSError if the address cannot be bound."""
        self._listener = shm_socket.bind(self._address)
        path = socket_file(self._address)
        self._file = SocketFile(path) if path else None
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        tasks = {self._accepting, *self._sessions}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._file:
            self._file.remove()
        self._listener.close()

    async def _accept(self) -> None:
        events = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await events.sock_accept(self._listener)
            except OSError as error:
                log.error("cannot accept a router: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            session = asyncio.create_task(self._run(connection))
            self._sessions.add(session)
            session.add_done_callback(self._sessions.discard)

    async def _run(self, connection: socket.socket) -> None:
        with connection:
            try:
                link: ShmLink[Incoming, Outgoing] = shm_socket.offer(connection, self._parse)
            except OSError as error:
                log.error("refused a router: %s", error)
                return
            try:
                await self._serve(link)
            except Exception:
                log.exception("a session failed")
            finally:
                link.close()
