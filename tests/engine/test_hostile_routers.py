"""Routers that send nonsense: an engine process ends their connection, and serves the others rightly."""

from __future__ import annotations

import array
import asyncio
import contextlib
import math
import mmap
import os
import random
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc
from pagoda.v1 import inference_pb2
from pagoda_server.channel.address import socket_name
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.settings.request import MAX_LOGPROBS, MAX_N
from tests.engine.harness import VOCAB_SIZE
from tests.engine.test_server import Session, connected
from tests.servers import running_engine

MAX_UINT32, MAX_UINT64 = (1 << 32) - 1, (1 << 64) - 1
RouterMessage, Submit = engine_pb2.RouterMessage, engine_pb2.Submit


# Over gRPC these tests are slow ones: after many others in one process, grpc.aio's client sometimes waits for ever.
@pytest.fixture(scope="module", params=[pytest.param("unix", marks=pytest.mark.slow), "shm"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("channel") / "engine.sock"
    listen = f"{request.param}:{path}"
    with running_engine(listen, "--model", "synthetic", "--step-ms", "1", "--max-num-seqs", "64") as process:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        yield listen
        assert process.poll() is None, "the engine died"


def submit(first: int = 1, **fields: Any) -> engine_pb2.Submit:
    sampling = inference_pb2.Sampling(**{"seed": 1, **fields.pop("sampling", {})})
    return Submit(**{"first_sequence": first, "prompt": [1, 2], "max_tokens": 4, "sampling": sampling, **fields})


NONSENSE: dict[str, RouterMessage] = {
    "no content": RouterMessage(),
    "logprobs": RouterMessage(submit=submit(logprobs=MAX_UINT32)),
    "n": RouterMessage(submit=submit(sampling={"n": MAX_UINT32})),
    "first_sequence": RouterMessage(submit=submit(first=MAX_UINT64, sampling={"n": 2})),
    "no prompt": RouterMessage(submit=submit(prompt=[])),
    "max_tokens": RouterMessage(submit=submit(max_tokens=0)),
    "min_tokens": RouterMessage(submit=submit(min_tokens=5)),
    "stop ids": RouterMessage(submit=submit(stop_token_ids=range(1000))),
    "temperature": RouterMessage(submit=submit(sampling={"temperature": math.nan})),
    "top_p": RouterMessage(submit=submit(sampling={"top_p": -1.0})),
    "repetition_penalty": RouterMessage(submit=submit(sampling={"repetition_penalty": math.inf})),
    "bias": RouterMessage(submit=submit(sampling={"logit_bias": {1: math.nan}})),
    "biases": RouterMessage(submit=submit(sampling={"logit_bias": dict.fromkeys(range(2000), 1.0)})),
    "deadline": RouterMessage(submit=submit(timeout_s=math.nan)),
    "age": RouterMessage(submit=submit(age_s=math.inf)),
    "slo": RouterMessage(submit=submit(slo=inference_pb2.Slo(tpot_s=math.nan))),
    "priority": RouterMessage(submit=submit(priority=-(1 << 31))),
    "tenant": RouterMessage(submit=submit(tenant="x" * 100_000)),
    "request id": RouterMessage(submit=submit(request_id="line\nbreak")),
    "salt": RouterMessage(submit=submit(cache=inference_pb2.Cache(salt="x" * 100_000))),
    "outputs": RouterMessage(submit=submit(outputs=[inference_pb2.TokenIds(ids=[1])] * 3)),
    "logprobs of no token": RouterMessage(submit=submit(readout=engine_pb2.Readout(logprobs_from=0))),
    "logprobs behind the prompt": RouterMessage(submit=submit(readout=engine_pb2.Readout(logprobs_from=1000))),
    "top logprobs of a prompt": RouterMessage(submit=submit(readout=engine_pb2.Readout(num_top=MAX_UINT32))),
    "pooling": RouterMessage(submit=submit(readout=engine_pb2.Readout(pooling=99))),  # type: ignore[arg-type]
    "a readout of what exists": RouterMessage(
        submit=submit(readout=engine_pb2.Readout(), outputs=[inference_pb2.TokenIds(ids=[1])])
    ),
    "aborts": RouterMessage(abort=engine_pb2.Abort(sequences=range(100_000))),
    "trace": RouterMessage(take_trace=engine_pb2.TakeTrace(number=1, last_s=math.nan)),
}
UNFIT = {
    "a long prompt": submit(prompt=[1] * 40_000),
    "a million tokens, many times": submit(prompt=[1] * 1_000_000, sampling={"n": MAX_N}),
    "an id of the prompt": submit(prompt=[1, VOCAB_SIZE]),
    "an id of an output": submit(outputs=[inference_pb2.TokenIds(ids=[MAX_UINT32])]),
    "a bias": submit(sampling={"logit_bias": {MAX_UINT32: 1.0}}),
    "an allowed id": submit(sampling={"allowed_token_ids": [MAX_UINT32]}),
}


async def until_longer(session: Session, count: int) -> None:
    async with asyncio.timeout(30):
        while len(session.tokens.get(1, [])) <= count:  # noqa: ASYNC110 (another task reads)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def undisturbed(address: str) -> AsyncIterator[None]:
    """Another router's stream goes on through the block, and has the right tokens."""
    async with connected(address) as other:
        await other.submit(1, [9, 9], max_tokens=20_000)
        reading = asyncio.create_task(other.receive_until_ended(1))
        await until_longer(other, 0)
        yield
        await until_longer(other, len(other.tokens[1]) + 5)
        assert not reading.done()
        assert other.tokens[1] == expected_tokens([9, 9], len(other.tokens[1]), VOCAB_SIZE)
        reading.cancel()


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_router_that_sends_nonsense_loses_its_connection_alone(address: str, name: str) -> None:
    async with undisturbed(address), connected(address) as hostile:
        await hostile.submit(7, [1], max_tokens=20_000)
        await hostile.link.write(NONSENSE[name])
        async with asyncio.timeout(5):
            await read_until_dropped(hostile)


@pytest.mark.parametrize("name", UNFIT)
async def test_a_request_that_the_engine_can_never_run_is_rejected_and_its_router_stays(
    address: str, name: str
) -> None:
    async with undisturbed(address), connected(address) as session:
        await session.link.write(RouterMessage(submit=UNFIT[name]))
        count = UNFIT[name].sampling.n or 1
        await session.receive_until_ended(*range(1, 1 + count))
        assert {ended.reason for ended in session.ended.values()} == {engine_pb2.END_REASON_REJECTED}
        assert session.ended[1].detail
        assert not session.tokens
        await session.submit(100, [3], max_tokens=2)
        await session.receive_until_ended(100)
        assert session.tokens[100] == expected_tokens([3], 2, VOCAB_SIZE)


async def test_stop_ids_that_no_token_has_stop_nothing(address: str) -> None:
    async with connected(address) as session:
        await session.submit(1, [1, 2], max_tokens=4, min_tokens=2, stop_token_ids=[VOCAB_SIZE, MAX_UINT32])
        await session.receive_until_ended(1)
        assert session.tokens[1] == expected_tokens([1, 2], 4, VOCAB_SIZE)


UINT32 = st.one_of(st.integers(0, 300), st.sampled_from([VOCAB_SIZE, 1 << 16, 1 << 31, MAX_UINT32]))
UINT64 = st.integers(0, MAX_UINT64)
FLOAT = st.one_of(st.floats(width=32), st.sampled_from([0.0, 0.5, 1.0]))
IDS = st.one_of(st.lists(UINT32, max_size=30), st.just([1] * 50_000))
SAMPLING = st.builds(
    inference_pb2.Sampling,
    temperature=FLOAT, top_k=UINT32, top_p=FLOAT, min_p=FLOAT, top_n_sigma=FLOAT, repetition_penalty=FLOAT,
    presence_penalty=FLOAT, frequency_penalty=FLOAT, seed=st.integers(0, MAX_UINT64), n=UINT32,
    logit_bias=st.dictionaries(UINT32, FLOAT, max_size=3), allowed_token_ids=IDS,
)  # fmt: skip
VALID = st.builds(
    inference_pb2.Sampling, temperature=st.floats(0, 2, width=32), n=st.integers(1, 3), seed=st.integers(0, 9)
)
READOUT = st.builds(
    engine_pb2.Readout,
    logprobs_from=st.one_of(st.none(), st.integers(0, 40)), num_top=st.integers(0, MAX_LOGPROBS + 1),
    pooling=st.integers(0, 4),
)  # fmt: skip
SUBMIT = st.builds(
    Submit,
    first_sequence=st.integers(0, MAX_UINT64), prompt=IDS, sampling=st.one_of(VALID, VALID, SAMPLING),
    max_tokens=UINT32, min_tokens=st.one_of(st.just(0), UINT32), stop_token_ids=st.one_of(st.just([]), IDS),
    logprobs=st.one_of(st.integers(0, MAX_LOGPROBS + 1), UINT32), priority=st.integers(-1001, 1001),
    timeout_s=st.one_of(st.just(5.0), st.floats()), age_s=st.one_of(st.just(0.0), st.floats()),
    tenant=st.one_of(st.just(""), st.text(max_size=70)), request_id=st.one_of(st.just(""), st.text(max_size=130)),
    cache=st.builds(inference_pb2.Cache, salt=st.text(max_size=40), bypass=st.booleans()),
    slo=st.one_of(st.none(), st.builds(inference_pb2.Slo, ttft_s=st.floats(), tpot_s=st.floats())),
    outputs=st.lists(st.builds(inference_pb2.TokenIds, ids=IDS), max_size=2),
    readout=st.one_of(st.none(), READOUT),
    max_draft_tokens=st.one_of(st.none(), st.integers(0, 17), UINT32),
)  # fmt: skip
MESSAGE = st.one_of(
    st.builds(RouterMessage, submit=SUBMIT),
    st.builds(RouterMessage, submit=SUBMIT),
    st.builds(RouterMessage, abort=st.builds(engine_pb2.Abort, sequences=st.lists(st.integers(0, MAX_UINT64)))),
    st.builds(RouterMessage, flush_cache=st.just(engine_pb2.FlushCache())),
    st.builds(RouterMessage, take_trace=st.builds(engine_pb2.TakeTrace, number=UINT64, last_s=st.floats())),
)  # fmt: skip


@pytest.mark.thorough
def test_whatever_routers_send_another_routers_stream_goes_on_and_is_right(address: str) -> None:
    """Hundreds of messages, each from a router of its own as soon as the last one was dropped."""
    with asyncio.Runner() as runner:
        messages: list[RouterMessage] = []

        @settings(max_examples=400, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(MESSAGE)
        def collect(message: RouterMessage) -> None:
            messages.append(message)

        collect()
        runner.run(send_all(address, messages))


async def send_all(address: str, messages: list[RouterMessage]) -> None:
    async with undisturbed(address):
        while messages:
            async with connected(address) as hostile:
                reading = asyncio.create_task(read_until_dropped(hostile))
                while messages and not reading.done():
                    with contextlib.suppress(ConnectionError, OSError):
                        await hostile.link.write(messages.pop())
                    await asyncio.sleep(0.002)
                reading.cancel()
        async with connected(address) as session:
            await session.submit(1, [1, 2], max_tokens=50, logprobs=2)
            await session.receive_until_ended(1)
            assert session.tokens[1] == expected_tokens([1, 2], 50, VOCAB_SIZE)


async def read_until_dropped(session: Session) -> None:
    with contextlib.suppress(ConnectionError, OSError):
        while await session.link.read() is not None:
            pass


def test_a_router_whose_first_message_is_refused_gets_the_reason_and_others_are_served(tmp_path: Path) -> None:
    """A hundred of them over gRPC: the refusal meets the engine's own first message in some."""
    listen = f"unix:{tmp_path / 'engine.sock'}"
    with running_engine(listen, "--model", "synthetic") as process, grpc.insecure_channel(listen) as channel:
        grpc.channel_ready_future(channel).result(60)
        stub = engine_pb2_grpc.EngineStub(channel)
        is_over = threading.Event()

        def messages(message: RouterMessage) -> Iterator[RouterMessage]:
            yield message
            is_over.wait(60)

        def end(_: int) -> tuple[grpc.StatusCode, str]:
            call = stub.Connect(messages(NONSENSE["n"]), timeout=10)
            with contextlib.suppress(grpc.RpcError):
                for _ in call:
                    pass
            return call.code(), call.details()

        with ThreadPoolExecutor(20) as threads:
            ends = set(threads.map(end, range(100)))
        reason = "the engine has dropped this router: it sent an invalid sampling.n"
        assert ends == {(grpc.StatusCode.INVALID_ARGUMENT, reason)}
        for message in stub.Connect(messages(RouterMessage(submit=submit())), timeout=30):
            if message.step.ended:
                assert message.step.ended[0].reason == engine_pb2.END_REASON_LENGTH
                break
        is_over.set()
        assert process.poll() is None


# Below messages: bytes.


@pytest.mark.parametrize(
    "payload", [b"\xff" * 20, b"\x0a\xff\xff\xff\x0f", random.Random(0).randbytes(4096)], ids=range(3)
)
async def test_bytes_that_are_no_message_end_the_connection(address: str, payload: bytes) -> None:
    async with undisturbed(address):
        if address.startswith("shm:"):
            async with rings(address) as ring:
                ring.put(struct.pack("<I", len(payload)) + payload)
                assert await ring.is_closed()
        else:
            assert await asyncio.to_thread(status_of, address, payload) is not grpc.StatusCode.DEADLINE_EXCEEDED


def status_of(address: str, payload: bytes) -> grpc.StatusCode:
    """How a connection ends on which these bytes are sent as a message, and which the client leaves open."""
    is_over = threading.Event()

    def messages() -> Iterator[bytes]:
        yield payload
        is_over.wait(60)

    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream("/pagoda.engine.v1.Engine/Connect")(messages(), timeout=30)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        is_over.set()
        return call.code()


class Rings:
    """A router's end of a connection over shared memory, without the checks of ring.py."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        message, self.descriptors, _, _ = socket.recv_fds(connection, 64, 5)
        (self.size,) = struct.unpack("<8xI", message)
        self.memory = mmap.mmap(self.descriptors[0], 2 * self.size)
        self.filled, self.freed = self.descriptors[1], self.descriptors[4]
        self.completion_filled = self.descriptors[3]
        self.at = 0

    def put(self, data: bytes) -> None:
        self.memory[self.at : self.at + len(data)] = data
        self.at += len(data)
        os.eventfd_write(self.filled, len(data))

    async def is_closed(self) -> bool:
        """Whether the engine closes its socket within five seconds."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            return await loop.sock_recv(self._connection, 1) == b""


@contextlib.asynccontextmanager
async def rings(address: str) -> AsyncIterator[Rings]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(socket_name(address))
        ring = Rings(connection)
        connection.setblocking(False)
        yield ring
        for descriptor in ring.descriptors:
            os.close(descriptor)


HOSTILE_RINGS: dict[str, Callable[[Rings], None]] = {
    "a length beyond the limit": lambda ring: ring.put(struct.pack("<I", MAX_UINT32)),
    "more bytes than the ring has": lambda ring: os.eventfd_write(ring.filled, ring.size + 1),
    "as many bytes as a counter holds": lambda ring: os.eventfd_write(ring.filled, MAX_UINT64 - 1),
    "more room than the ring has": lambda ring: os.eventfd_write(ring.freed, ring.size),
    "a full counter of the engine's own": lambda ring: os.eventfd_write(
        ring.completion_filled, MAX_UINT64 - 1 - (1 << 20)
    ),
    "an empty message": lambda ring: ring.put(struct.pack("<I", 0)),
    "garbage": lambda ring: ring.put(array.array("I", [7, MAX_UINT32, 5]).tobytes()),
}


@pytest.mark.parametrize("name", HOSTILE_RINGS)
async def test_rings_with_impossible_positions_end_the_connection(address: str, name: str) -> None:
    if not address.startswith("shm:"):
        pytest.skip("shared memory alone has rings")
    async with undisturbed(address), rings(address) as ring:
        HOSTILE_RINGS[name](ring)
        if "room" in name or "own" in name:  # noticed when the engine next writes
            await asyncio.sleep(0.5)
        else:
            assert await ring.is_closed()


async def test_half_a_message_holds_up_nothing(address: str, tmp_path: Path) -> None:
    if not address.startswith("shm:"):
        pytest.skip("gRPC frames its messages itself")
    async with undisturbed(address), rings(address) as ring:
        ring.put(struct.pack("<I", 1000) + b"half")
        await asyncio.sleep(0.2)
    async with undisturbed(address):
        pass
