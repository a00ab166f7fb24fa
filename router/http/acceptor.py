"""What a crowd of clients may do in one turn of the event loop, so that streams are written between two turns.

libuv accepts every connection that waits, and reads from every connection that has sent something, before it does
anything else. With two thousand clients that would be one turn of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable

PARSING_S = 0.0005  # in a turn; the handlers that it starts run in the next one, and refuse in ten times that time
ACCEPTS = 4  # connections in a turn; each takes about 150 µs
HANDSHAKE_S = 10.0  # that a client has for TLS, before its connection counts and has times of its own
MAX_HANDSHAKES = min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)  # at once; further ones are closed
FULL_S = 0.1  # until the next try to accept, when this process has no file left


class Pace:
    """Runs work in the order in which it was posted, for a limited time in each turn of the event loop.

    turn_s            of a turn, after which no more work begins; 0: one piece of work in each turn
    are_streams_late  whether tokens have waited for too long to be written: turns have one piece of work then
    """

    def __init__(self, turn_s: float, are_streams_late: Callable[[], bool] = lambda: False) -> None:
        self._turn_s = turn_s
        self._are_streams_late = are_streams_late
        self._work: deque[Callable[[], None]] = deque()
        self._is_due = False

    def post(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._schedule()

    async def turn(self) -> None:
        """Wait until this one's turn has come."""
        turn = asyncio.get_running_loop().create_future()
        self.post(lambda: None if turn.done() else turn.set_result(None))
        await turn

    def _schedule(self) -> None:
        if self._work and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_due = False
        end = time.perf_counter() + (0 if self._are_streams_late() else self._turn_s)
        try:
            while self._work:
                self._work.popleft()()
                if time.perf_counter() >= end:
                    break
        finally:
            self._schedule()


class SenderClock:
    """A clock that runs while a connection waits for its client, and stands while the client waits for this server.

    What a client has sent waits for its turn here. That time is no fault of the client.
    """

    KEY = "pagoda.sender_clock"  # of its `time` in the scope of a request

    def __init__(self) -> None:
        self._stood_s = 0.0
        self._stands_since: float | None = None

    def stand(self) -> None:
        if self._stands_since is None:
            self._stands_since = time.monotonic()

    def run(self) -> None:
        if self._stands_since is not None:
            self._stood_s += time.monotonic() - self._stands_since
            self._stands_since = None

    def time(self) -> float:
        """Seconds since some moment."""
        return (time.monotonic() if self._stands_since is None else self._stands_since) - self._stood_s


class Acceptor:
    """Accepts connections on a listening socket, a few in a turn. Stands for the asyncio.Server of that socket.

    are_streams_late  see Pace
    """

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        are_streams_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self._socket = listening
        self._make_protocol = make_protocol
        self._tls = tls
        self._are_streams_late = are_streams_late
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Stop listening. Connections that have been made are accepted first: closing the socket would reset them."""
        if self._socket.fileno() == -1:
            return
        self._loop.remove_reader(self._socket)
        if self._retry is not None:
            self._retry.cancel()
        with contextlib.suppress(OSError):
            while self._accept_one():
                pass
        self._socket.close()

    async def wait_closed(self) -> None:
        """There is nothing to wait for: connections are closed by their owner."""

    def _accept(self) -> None:
        for _ in range(1 if self._are_streams_late() else ACCEPTS):
            try:
                if not self._accept_one():
                    return
            except OSError:  # no file is left; the connections wait in the kernel
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(FULL_S, self._loop.add_reader, self._socket, self._accept)
                return

    def _accept_one(self) -> bool:
        """Accept a connection; return False if none waits. Raises OSError if this process has no file left."""
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        if len(self._connecting) >= MAX_HANDSHAKES:
            accepted.close()
            return True
        accepted.setblocking(False)
        task = self._loop.create_task(self._connect(accepted))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    async def _connect(self, accepted: socket.socket) -> None:
        limit_s = HANDSHAKE_S if self._tls is not None else None
        with contextlib.suppress(OSError):  # the client has gone, does not speak TLS, or takes too long
            await self._loop.connect_accepted_socket(
                self._make_protocol, accepted, ssl=self._tls, ssl_handshake_timeout=limit_s
            )
