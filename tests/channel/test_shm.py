"""Links over shared memory and real sockets, with both ends in one process."""

from __future__ import annotations

import asyncio
import errno
import itertools
import mmap
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda_server.channel import ring, shm
from pagoda_server.channel.link import Link
from pagoda_server.channel.ring import RING_BYTES, RingPair
from pagoda_server.channel.shm import ShmLink, ShmServer

Message = engine_pb2.Ended  # any message with a string
AnyLink = Link[Message, Message]
NAMES = itertools.count()

pytestmark = pytest.mark.usefixtures("virtual_time")


def message(size: int, fill: str = "x") -> Message:
    return Message(sequence=size, detail=fill * size)


async def connect(address: str) -> ShmLink[Message, Message]:
    return await shm.connect(address, Message.FromString)


async def echo(link: AnyLink) -> None:
    while (received := await link.read()) is not None:
        await link.write(received)


@asynccontextmanager
async def serving(serve: Callable[[AnyLink], Awaitable[None]] = echo, address: str | None = None) -> AsyncIterator[str]:
    address = address or f"shm:@pagoda-test-{os.getpid()}-{next(NAMES)}"
    server = ShmServer(address, Message.FromString, serve)
    await server.start()
    try:
        yield address
    finally:
        await server.stop()


@asynccontextmanager
async def both_ends() -> AsyncIterator[tuple[ShmLink[Message, Message], ShmLink[Message, Message]]]:
    """The engine's end and the router's."""
    accepted: asyncio.Future[ShmLink[Message, Message]] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def hold(link: AnyLink) -> None:
        accepted.set_result(link)
        await over.wait()

    async with serving(hold) as address:
        router = await connect(address)
        yield await accepted, router
        router.close()
        over.set()


def poke(link: ShmLink[Message, Message], data: bytes) -> None:
    """Put raw bytes into the ring."""
    assert link._writer.write(memoryview(data)) == len(data)


@pytest.mark.parametrize("size", [0, 1, 1000, RING_BYTES - 20, RING_BYTES - 4, RING_BYTES, 3_000_000])
async def test_a_message_of_any_size_comes_back_whole(size: int) -> None:
    async with serving() as address:
        link = await connect(address)
        for fill in "ab":
            await link.write(message(size, fill))
            assert await link.read() == message(size, fill)
        link.close()


async def test_an_empty_message_is_a_message() -> None:
    async with both_ends() as (engine, router):
        await engine.write(Message())
        assert await router.read() == Message()


async def test_messages_arrive_in_order_while_both_ends_write_more_than_fits() -> None:
    sizes = [(at * 7919) % 50_000 for at in range(300)]

    async def write(link: AnyLink) -> None:
        for size in sizes:
            await link.write(message(size))

    async def read(link: AnyLink) -> list[int]:
        return [len((await link.read()).detail) for _ in sizes]

    async with both_ends() as (engine, router):
        _, _, *got = await asyncio.gather(write(engine), write(router), read(engine), read(router))
    assert got == [sizes, sizes]


async def test_a_full_ring_makes_the_writer_wait_and_nothing_is_lost() -> None:
    async with both_ends() as (engine, router):
        written = 0

        async def write_on() -> None:
            nonlocal written
            while True:
                await engine.write(message(1000, "y"))
                written += 1

        writing = asyncio.create_task(write_on())
        await asyncio.sleep(0.05)
        before = written
        assert RING_BYTES // 1100 < before < RING_BYTES // 1000
        await asyncio.sleep(0.05)
        assert written == before
        for _ in range(before + 1):
            assert await router.read() == message(1000, "y")
        await asyncio.sleep(0.05)
        assert written > before
        writing.cancel()


async def test_a_message_that_has_room_is_written_at_once() -> None:
    async with both_ends() as (engine, router):
        assert engine.try_write(message(1000))
        assert engine.try_write(Message())
        assert await router.read() == message(1000)
        assert await router.read() == Message()


async def test_nothing_is_written_at_once_if_it_would_have_to_wait() -> None:
    async with both_ends() as (engine, router):
        written = 0
        while engine.try_write(message(1000)):
            written += 1
        assert RING_BYTES // 1100 < written < RING_BYTES // 1000
        waiting = asyncio.create_task(engine.write(message(1001)))
        await asyncio.sleep(0.01)
        assert not engine.is_free, "a message written now would land inside the other"
        for _ in range(written):
            assert await router.read() == message(1000)
        assert await router.read() == message(1001)
        await waiting
        assert engine.is_free
        assert engine.try_write(Message())
        router.close()
        await asyncio.sleep(0.01)
        assert not engine.is_free


async def test_what_was_written_before_the_end_is_still_read() -> None:
    async with both_ends() as (engine, router):
        for at in range(3):
            await router.write(message(at))
        router.close()
        for at in range(3):
            assert await engine.read() == message(at)
        assert await engine.read() is None
        with pytest.raises(ConnectionError, match="closed"):
            await engine.write(message(1))


async def test_the_end_wakes_a_reader_and_a_writer_that_wait() -> None:
    async with both_ends() as (engine, router):
        reading = asyncio.create_task(engine.read())
        writing = asyncio.create_task(engine.write(message(2 * RING_BYTES)))
        await asyncio.sleep(0.01)
        assert not reading.done()
        assert not writing.done()
        router.close()
        assert await asyncio.wait_for(reading, 1) is None
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(writing, 1)


async def test_closing_a_link_ends_its_own_reader() -> None:
    async with both_ends() as (_, router):
        reading = asyncio.create_task(router.read())
        await asyncio.sleep(0.01)
        router.close()
        router.close()
        assert await asyncio.wait_for(reading, 1) is None


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (struct.pack("<I", 0xFFFF_FFFF) + b"x", "exceeds the limit"),
        (struct.pack("<I", 5) + b"\xff\xff\xff\xff\xff", "invalid message"),
    ],
    ids=["length", "content"],
)
async def test_garbage_is_an_error_of_the_connection(data: bytes, complaint: str) -> None:
    async with both_ends() as (engine, router):
        poke(router, data)
        with pytest.raises(ConnectionError, match=complaint):
            await asyncio.wait_for(engine.read(), 1)


async def test_half_a_message_reads_as_the_end() -> None:
    async with both_ends() as (engine, router):
        poke(router, struct.pack("<I", 100) + b"the writer was killed here")
        router.close()
        assert await asyncio.wait_for(engine.read(), 1) is None


async def test_a_count_that_cannot_be_is_an_error_of_the_connection() -> None:
    async with both_ends() as (engine, router):
        os.eventfd_write(router._rings.submission.filled, 10 * RING_BYTES)
        router.close()
        with pytest.raises(ConnectionError, match="bytes in a ring"):
            await asyncio.wait_for(engine.read(), 1)
        with pytest.raises(ConnectionError):
            await engine.write(message(1))


async def test_a_router_that_talks_on_the_socket_is_gone() -> None:
    async with both_ends() as (engine, router):
        router._connection.send(b"hello?")
        assert await asyncio.wait_for(engine.read(), 1) is None


async def test_a_session_that_fails_closes_its_link_and_no_other() -> None:
    async def fail_on_request(link: AnyLink) -> None:
        while (received := await link.read()) is not None:
            if received.detail == "fail":
                raise ValueError("as asked")
            await link.write(received)

    async with serving(fail_on_request) as address:
        one, other = await connect(address), await connect(address)
        await one.write(Message(detail="fail"))
        assert await asyncio.wait_for(one.read(), 1) is None
        await other.write(message(5))
        assert await other.read() == message(5)
        one.close()
        other.close()


async def test_nothing_is_left_open_or_mapped_after_many_connections() -> None:
    process = psutil.Process()

    def held() -> tuple[int, int]:
        return process.num_fds(), sum("pagoda-channel" in area.path for area in process.memory_maps(grouped=False))

    async with serving() as address:
        before = held()
        for _ in range(20):
            link = await connect(address)
            await link.write(message(10))
            await link.read()
            assert held()[0] > before[0]
            link.close()
        await asyncio.sleep(0.05)
        assert held() == before


async def test_an_engine_without_descriptors_refuses_and_serves_again_when_it_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as address:
        before = psutil.Process().num_fds()
        with monkeypatch.context() as patch:
            patch.setattr(os, "eventfd", lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, "too many open files")))
            with pytest.raises(ConnectionError, match="before it offered"):
                await connect(address)
        await asyncio.sleep(0.01)
        assert psutil.Process().num_fds() == before
        (await connect(address)).close()


async def test_a_socket_file_is_its_owners_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    async with serving(address=f"shm:{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_the_memory_is_its_owners_alone_and_cannot_shrink() -> None:
    async with both_ends() as (engine, _):
        memory = engine._rings._descriptors[0]
        assert stat.S_IMODE(os.fstat(memory).st_mode) == 0o600
        with pytest.raises(PermissionError):
            os.ftruncate(memory, mmap.PAGESIZE)


async def test_the_file_of_a_killed_engine_is_replaced_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    address = f"shm:{tmp_path / 'engine.sock'}"
    shm.bind(address).close()  # its file stays
    async with serving(address=address):
        with pytest.raises(OSError, match="in use"):
            shm.bind(address)
        (await connect(address)).close()


async def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match="in use"):
        shm.bind(f"shm:{path}")
    assert path.read_text() == "data"


async def test_another_users_process_is_refused_by_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as address:
        mine = os.geteuid()
        users = iter([mine, mine + 1])  # as the router sees the engine, then as the engine sees the router
        monkeypatch.setattr(os, "geteuid", lambda: next(users, mine))
        with pytest.raises(ConnectionError, match="before it offered"):
            await connect(address)
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        with pytest.raises(ConnectionError, match=f"belongs to user {mine}"):
            await connect(address)


@asynccontextmanager
async def listening(answer: Callable[[socket.socket], None]) -> AsyncIterator[str]:
    """Listen at an address as something other than an engine: accept once and answer."""
    address = f"shm:@pagoda-test-{os.getpid()}-{next(NAMES)}"
    with shm.bind(address) as listener:

        async def accept() -> socket.socket:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            answer(connection)
            return connection

        accepting = asyncio.create_task(accept())
        yield address
        (await accepting).close()


async def test_a_process_that_is_not_an_engine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(lambda connection: connection.send(b"PRI * HTTP/2.0")) as address:
        with pytest.raises(ConnectionError, match="not an engine of this version"):
            await connect(address)
    monkeypatch.setattr(shm, "_OFFER_TIMEOUT_S", 0.05)
    async with listening(lambda connection: None) as address:
        with pytest.raises(ConnectionError, match="offered nothing"):
            await connect(address)


async def test_memory_that_could_shrink_is_refused_and_its_descriptors_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_SEALS", 0)
    pair = RingPair.create()
    monkeypatch.undo()
    async with listening(pair.offer) as address:
        before = psutil.Process().num_fds()
        with pytest.raises(ConnectionError, match="can shrink"):
            await connect(address)
        await asyncio.sleep(0.01)
        assert psutil.Process().num_fds() == before + 1  # the connection that listening() has accepted
    pair.close()
