"""Blocks over real sockets: what a lender refuses, and what comes of lenders that fail, lie or hang."""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc
from pagoda_server.engine.kv.block_store import Done
from pagoda_server.engine.serving import block_lender, block_peers
from pagoda_server.engine.serving.block_lender import AT_ONCE, PARTS_ASKED, BlockLender, Lent
from pagoda_server.engine.serving.block_peers import BlockPeers
from pagoda_server.runtime.channel_trust import ChannelTrust
from pagoda_server.settings import EngineConfig

SIZE, LAYOUT, MOST = 64, b"l" * 32, 20
LENT = Lent(LAYOUT, SIZE, MOST)


def address_of(at: int) -> bytes:
    return bytes([at]) * 32


def content_of(address: bytes) -> bytes:
    return address * 2


class Rows:
    """Host memory."""

    def __init__(self) -> None:
        self.memory = bytearray(SIZE * 32)

    def host_row(self, host: int) -> memoryview:
        return memoryview(self.memory)[host * SIZE : (host + 1) * SIZE]

    def copy(self, plan: object) -> None:
        raise NotImplementedError


class Fake(engine_pb2_grpc.BlocksServicer):
    """A lender with a given answer."""

    def __init__(self, answer: Callable[[engine_pb2.FetchRequest, Any], Iterator[engine_pb2.FetchedBlock]]) -> None:
        self._answer = answer

    def Fetch(self, request: engine_pb2.FetchRequest, context: Any) -> Iterator[engine_pb2.FetchedBlock]:
        yield from self._answer(request, context)


@contextmanager
def lender(folder: Path, answer: Any) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    engine_pb2_grpc.add_BlocksServicer_to_server(Fake(answer), server)
    address = f"unix:{folder / 'lender.sock'}"
    server.add_insecure_port(address)
    server.start()
    try:
        yield address
    finally:
        server.stop(0)


def fetched(address: str, count: int = 4) -> tuple[list[bool], Rows]:
    """Ask for so many blocks; return what became of each."""
    rows = Rows()
    peers = BlockPeers(rows, LENT, ChannelTrust(EngineConfig(), is_engine=True))
    peers.read(address, [(address_of(at), at) for at in range(count)])
    done: list[Done] = []
    deadline = time.monotonic() + 60
    while len(done) < count:
        done += peers.take_done()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    peers.close()
    assert [each.host for each in done] == [*range(count)]
    return [each.is_ok for each in done], rows


def block(address: bytes, **changes: Any) -> engine_pb2.FetchedBlock:
    content = content_of(address)
    return engine_pb2.FetchedBlock(**({"content": content, "crc32": zlib.crc32(content)} | changes))


def test_blocks_come_into_their_host_blocks(tmp_path: Path) -> None:
    def answer(request: engine_pb2.FetchRequest, context: Any) -> Iterator[engine_pb2.FetchedBlock]:
        assert request.layout == LAYOUT
        yield from map(block, request.addresses)

    with lender(tmp_path, answer) as address:
        outcomes, rows = fetched(address)
    assert outcomes == [True] * 4
    assert all(bytes(rows.host_row(at)) == content_of(address_of(at)) for at in range(4))


def test_a_block_that_has_come_counts_before_the_others_come(tmp_path: Path) -> None:
    rest = threading.Event()

    def answer(request: engine_pb2.FetchRequest, context: Any) -> Iterator[engine_pb2.FetchedBlock]:
        yield block(request.addresses[0])
        rest.wait(60)

    with lender(tmp_path, answer) as address:
        peers = BlockPeers(Rows(), LENT, ChannelTrust(EngineConfig(), is_engine=True))
        with patch.object(block_peers, "TIMEOUT_S", 60.0):
            peers.read(address, [(address_of(at), at) for at in range(2)])
            deadline = time.monotonic() + 30
            while not (done := peers.take_done()):
                assert time.monotonic() < deadline
                time.sleep(0.005)
        assert [(each.host, each.is_ok) for each in done] == [(0, True)]
        rest.set()
        peers.close()


WRONG: dict[str, Any] = {
    "content": {"crc32": 7},
    "length": {"content": b"x", "crc32": zlib.crc32(b"x")},
    "too_long": {"content": bytes(SIZE + 1), "crc32": zlib.crc32(bytes(SIZE + 1))},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_comes_behind_a_damaged_block_is_not_taken(tmp_path: Path, wrong: str) -> None:
    def answer(request: engine_pb2.FetchRequest, context: Any) -> Iterator[engine_pb2.FetchedBlock]:
        for at, each in enumerate(request.addresses):
            yield block(each, **(WRONG[wrong] if at == 2 else {}))

    with lender(tmp_path, answer) as address:
        outcomes, rows = fetched(address)
    assert outcomes == [True, True, False, False]
    assert bytes(rows.host_row(3)) == bytes(SIZE)


def test_a_stream_that_ends_early_breaks_or_never_ends_costs_blocks_alone(tmp_path: Path) -> None:
    def ends(request: engine_pb2.FetchRequest, context: Any) -> Iterator[engine_pb2.FetchedBlock]:
        yield block(request.addresses[0])

    def breaks(request: engine_pb2.FetchRequest, context: Any) -> Iterator[engine_pb2.FetchedBlock]:
        yield block(request.addresses[0])
        context.abort(grpc.StatusCode.INTERNAL, "on purpose")

    def goes_on(request: engine_pb2.FetchRequest, context: Any) -> Iterator[engine_pb2.FetchedBlock]:
        yield from map(block, request.addresses)
        while context.is_active():
            yield block(address_of(9))

    for at, (answer, expected) in enumerate([(ends, 1), (breaks, 1), (goes_on, 4)]):
        (folder := tmp_path / str(at)).mkdir()
        with lender(folder, answer) as address:
            outcomes, rows = fetched(address)
        assert outcomes == [True] * expected + [False] * (4 - expected)
        assert bytes(rows.host_row(4)) == bytes(SIZE), "no other host block is written"


def test_a_lender_that_hangs_is_given_up(tmp_path: Path) -> None:
    def hangs(request: engine_pb2.FetchRequest, context: Any) -> Iterator[engine_pb2.FetchedBlock]:
        yield block(request.addresses[0])
        while context.is_active():
            time.sleep(0.01)

    with lender(tmp_path, hangs) as address, patch.object(block_peers, "TIMEOUT_S", 0.5):
        outcomes, _ = fetched(address)
    assert outcomes == [True, False, False, False]


def test_a_lender_that_is_not_there_is_a_miss(tmp_path: Path) -> None:
    with patch.object(block_peers, "TIMEOUT_S", 1.0):
        assert fetched(f"unix:{tmp_path / 'nobody'}")[0] == [False] * 4


def test_what_a_thread_does_not_expect_is_a_miss_too() -> None:
    with patch.object(BlockPeers, "_channel", side_effect=ZeroDivisionError):
        assert fetched("unix:/x")[0] == [False] * 4


# -- the lender -------------------------------------------------------------------------------------------------------


class Engine:
    """Lends blocks 0 to 9."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.parts: list[int] = []
        self.num_waiting = 0
        self.is_full = asyncio.Event()  # as many calls as may be are there

    async def lend(self, addresses: list[bytes]) -> list[bytes]:
        self.num_waiting += 1
        if self.num_waiting == AT_ONCE * PARTS_ASKED:
            self.is_full.set()
        await self.gate.wait()
        self.parts.append(len(addresses))
        known = [address_of(at) for at in range(10)]
        end = next((at for at, each in enumerate(addresses) if each not in known), len(addresses))
        return [content_of(each) for each in addresses[:end]]


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Engine, Any]]:
    monkeypatch.setattr(block_lender, "PART_BYTES", 2 * SIZE)
    engine, server = Engine(), grpc.aio.server()
    trusted = BlockLender(engine.lend, LENT, lambda context: dict(context.invocation_metadata()).get("token") == "t")
    engine_pb2_grpc.add_BlocksServicer_to_server(trusted, server)
    address = f"unix:{tmp_path / 'engine.sock'}"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield engine, engine_pb2_grpc.BlocksStub(channel)
    await server.stop(0)


def asked(addresses: list[bytes], layout: bytes = LAYOUT) -> engine_pb2.FetchRequest:
    return engine_pb2.FetchRequest(layout=layout, addresses=addresses)


TRUSTED = (("token", "t"),)


async def test_blocks_are_lent_up_to_the_first_one_that_is_not_cached(served: tuple[Engine, Any]) -> None:
    _, stub = served
    got = [each async for each in stub.Fetch(asked([address_of(at) for at in (3, 4, 5, 11, 6)]), metadata=TRUSTED)]
    assert [each.content for each in got] == [content_of(address_of(at)) for at in (3, 4, 5)]
    assert all(zlib.crc32(each.content) == each.crc32 for each in got)


async def test_the_loop_gets_a_few_parts_to_copy_at_once_and_more_as_they_are_sent(served: tuple[Engine, Any]) -> None:
    engine, stub = served
    engine.gate.clear()
    call = stub.Fetch(asked([address_of(at) for at in range(10)]), metadata=TRUSTED)
    got = asyncio.ensure_future(_all(call))
    async with asyncio.timeout(30):
        while engine.num_waiting < PARTS_ASKED:  # noqa: ASYNC110 (the server's calls make it happen)
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert engine.num_waiting == PARTS_ASKED
    engine.gate.set()
    assert await got == [content_of(address_of(at)) for at in range(10)]
    assert engine.parts == [2] * 5


async def _all(call: Any) -> list[bytes]:
    return [each.content async for each in call]


async def test_a_call_that_takes_too_long_ends_and_gives_its_place_back(
    served: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_lender, "MOST_S", 0.05)
    engine, stub = served
    engine.gate.clear()
    for _ in range(AT_ONCE + 1):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _all(stub.Fetch(asked([address_of(1)]), metadata=TRUSTED))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        engine.gate.set()  # the loop answers
        await asyncio.sleep(0)
        engine.gate.clear()


LARGE = bytes(8 << 20)  # more than is sent to a borrower that reads nothing


@pytest.fixture
async def lends_large_blocks(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """What asks a lender for three large blocks."""

    async def lend(addresses: list[bytes]) -> list[bytes]:
        return [LARGE] * len(addresses)

    server, lent = grpc.aio.server(), Lent(LAYOUT, len(LARGE), MOST)
    engine_pb2_grpc.add_BlocksServicer_to_server(BlockLender(lend, lent, lambda context: True), server)
    address = f"unix:{tmp_path / 'engine.sock'}"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        request = asked([address_of(at) for at in range(3)])
        yield partial(engine_pb2_grpc.BlocksStub(channel).Fetch, request)
    await server.stop(0)


async def test_calls_whose_blocks_are_not_taken_hold_their_places_until_one_is(
    lends_large_blocks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC sends no status while it sends a block: a call that was ended then would stay open, and count no more."""
    monkeypatch.setattr(block_lender, "MOST_S", 1.0)
    calls = [lends_large_blocks() for _ in range(AT_ONCE)]
    await asyncio.gather(*[call.initial_metadata() for call in calls])
    await asyncio.sleep(1.2)
    with pytest.raises(grpc.aio.AioRpcError, match="fetch blocks already"):
        await _all(lends_large_blocks())
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError, match="were not taken within"):
            await _all(call)
    assert await _all(lends_large_blocks()) == [LARGE] * 3
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_borrower_that_gives_up_while_a_block_is_sent_leaves_no_traceback(
    lends_large_blocks: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    calls = [lends_large_blocks(timeout=0.5) for _ in range(AT_ONCE)]
    assert [await call.code() for call in calls] == [grpc.StatusCode.DEADLINE_EXCEEDED] * AT_ONCE
    got: list[bytes] = []
    async with asyncio.timeout(30):
        while not got:
            with suppress(grpc.aio.AioRpcError):  # the lender has not heard of it yet
                got = await _all(lends_large_blocks())
    assert got == [LARGE] * 3
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("request_", "metadata", "code", "field"),
    [
        (asked([address_of(1)]), (), grpc.StatusCode.UNAUTHENTICATED, "token"),
        (asked([address_of(1)], b"other"), TRUSTED, grpc.StatusCode.FAILED_PRECONDITION, "layout"),
        (asked([]), TRUSTED, grpc.StatusCode.INVALID_ARGUMENT, "addresses: are 0, must be from 1 to 20"),
        (asked([address_of(1)] * 21), TRUSTED, grpc.StatusCode.INVALID_ARGUMENT, "addresses: are 21"),
        (asked([b"short"]), TRUSTED, grpc.StatusCode.INVALID_ARGUMENT, "addresses: must have 32 bytes each"),
    ],
)
async def test_a_wrong_request_is_refused(
    served: tuple[Engine, Any], request_: Any, metadata: Any, code: grpc.StatusCode, field: str
) -> None:
    engine, stub = served
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Fetch(request_, metadata=metadata):
            pass
    assert caught.value.code() is code
    assert field in str(caught.value.details())
    assert not engine.parts, "the loop is not asked"


async def test_few_calls_are_served_at_once_and_cancelled_ones_give_their_place_back_with_the_loops_answer(
    served: tuple[Engine, Any],
) -> None:
    engine, stub = served
    engine.gate.clear()
    calls = [stub.Fetch(asked([address_of(at) for at in range(6)]), metadata=TRUSTED) for _ in range(AT_ONCE)]
    reads = [asyncio.ensure_future(call.read()) for call in calls]
    await engine.is_full.wait()
    for call in calls:
        call.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    for _ in range(20):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Fetch(asked([address_of(1)]), metadata=TRUSTED).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert engine.num_waiting == AT_ONCE * PARTS_ASKED, "the loop's queue holds no more, however many are cancelled"
    engine.gate.set()
    deadline = time.monotonic() + 30
    while True:
        try:
            assert [each async for each in stub.Fetch(asked([address_of(1)]), metadata=TRUSTED)]
            break
        except grpc.aio.AioRpcError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
