"""A crowd of clients leaves every turn of the event loop to others."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from typing import Any

import pytest
import uvloop

from pagoda_server.router.http.acceptor import ACCEPTS, Acceptor, Pace
from pagoda_server.router.http.guards import Guard
from pagoda_server.router.http.http_call import Endpoint
from pagoda_server.router.http.server import HttpPort
from pagoda_server.router.tenants.identity import Identities

CROWD = 60
WORK_S = 0.005
REQUEST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


class Turns:
    """Counts turns of the event loop, and the longest."""

    def __init__(self) -> None:
        self.count = 0
        self.longest_s = 0.0
        self._last = time.perf_counter()
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        now = time.perf_counter()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now
        self.count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


def listening() -> socket.socket:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen(2 * CROWD)
    return bound


def crowd(address: tuple[str, int]) -> list[socket.socket]:
    """Clients that have connected and sent a request, which the kernel holds."""
    clients = [socket.create_connection(address) for _ in range(CROWD)]
    for client in clients:
        client.sendall(REQUEST)
    return clients


async def test_one_piece_of_work_is_done_in_a_turn() -> None:
    pace, turns, done = Pace(0), Turns(), []
    for at in range(CROWD):
        pace.post(lambda at=at: done.append((at, turns.count)))  # type: ignore[misc]
    while len(done) < CROWD:  # noqa: ASYNC110 (each turn counts)
        await asyncio.sleep(0)
    turns.stop()
    assert [at for at, _ in done] == [*range(CROWD)]
    assert len({turn for _, turn in done}) == CROWD


async def test_one_piece_of_work_is_done_in_a_turn_while_streams_are_late() -> None:
    are_late = True
    pace, turns, done = Pace(60, lambda: are_late), Turns(), []
    for _ in range(CROWD):
        pace.post(lambda: done.append(turns.count))
    while len(done) < CROWD // 2:  # noqa: ASYNC110 (each turn counts)
        await asyncio.sleep(0)
    assert len(set(done)) == len(done)
    are_late = False
    await asyncio.sleep(0.01)
    turns.stop()
    assert len(done) == CROWD
    assert len(set(done)) <= CROWD // 2 + 3  # the rest came in one turn


async def test_work_that_fails_or_is_cancelled_holds_up_no_other() -> None:
    pace, failed = Pace(0), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context["exception"]))
    pace.post(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    cancelled = asyncio.create_task(pace.turn())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait_for(pace.turn(), 60)
    assert [type(each) for each in failed] == [ZeroDivisionError]


@pytest.mark.parametrize("are_late", [False, True])
def test_a_few_connections_are_accepted_in_a_turn(are_late: bool) -> None:
    async def main() -> None:
        made: list[int] = []
        bound = listening()
        clients = crowd(bound.getsockname())
        turns = Turns()

        def protocol() -> asyncio.Protocol:
            made.append(turns.count)
            return asyncio.Protocol()

        acceptor = Acceptor(bound, protocol, None, lambda: are_late)
        while len(made) < CROWD:  # noqa: ASYNC110 (each turn counts)
            await asyncio.sleep(0)
        turns.stop()
        acceptor.close()
        assert max(made.count(turn) for turn in made) <= (1 if are_late else ACCEPTS)
        for each in (*clients, bound):
            each.close()

    uvloop.run(main())


def test_connections_that_find_no_file_are_accepted_later() -> None:
    class Full(socket.socket):
        num_failed = 0

        def accept(self) -> Any:
            if self.num_failed < 3:
                self.num_failed += 1
                raise OSError(errno.EMFILE, "no file is left")
            return super().accept()

    async def main() -> None:
        bound = Full()
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        client = socket.create_connection(bound.getsockname())
        accepted = asyncio.Event()

        def protocol() -> asyncio.Protocol:
            accepted.set()
            return asyncio.Protocol()

        acceptor = Acceptor(bound, protocol, None)
        await asyncio.wait_for(accepted.wait(), 60)
        assert bound.num_failed == 3
        acceptor.close()
        client.close()
        bound.close()

    uvloop.run(main())


class Inference:
    """Serves a request in a time that only a turn of its own hides."""

    def __init__(self) -> None:
        self.num_served = 0

    def refusal(self, tenant: str) -> None:
        return None

    async def generate(self, call: Any, parse: Any, route: str) -> None:
        time.sleep(WORK_S)  # noqa: ASYNC251 (it holds up the loop)
        self.num_served += 1
        raise ValueError("it has no answer")


class Api:
    def answer(self) -> Any:
        raise NotImplementedError


def test_requests_that_come_at_once_begin_in_turns_of_their_own() -> None:
    async def main() -> None:
        inference = Inference()
        endpoint = Endpoint(inference, "Generate", inference.generate, Api, 1 << 20)  # type: ignore[arg-type]
        guard = Guard(endpoint, Identities(), [], checks_host=True, allowed_hosts=[], allowed_origins=[])
        port = HttpPort("127.0.0.1:0", guard, shares_port=False, tls=None, stall_s=10)
        host, _, number = port.address.partition(":")
        clients = crowd((host, int(number)))
        turns = Turns()
        running = asyncio.create_task(port.run())
        while inference.num_served < CROWD:  # noqa: ASYNC110 (each turn counts)
            await asyncio.sleep(0)
        turns.stop()
        assert turns.longest_s < CROWD * WORK_S / 2
        for each in clients:
            each.close()
        await port.stop(1)
        await running

    uvloop.run(main())
