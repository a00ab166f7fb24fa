"""The channel as a router sees it: a real engine process with the synthetic model, over each transport."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.router.engines.transport import EngineLink, transport_to
from tests.engine.harness import VOCAB_SIZE
from tests.servers import running_engine


@pytest.fixture(scope="module", params=["unix", "shm"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("channel") / "engine.sock"
    listen = f"{request.param}:{path}"
    with running_engine(listen, "--model", "synthetic", "--step-ms", "1", "--max-num-seqs", "32"):
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        yield listen


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Session]:
    """Open a session and take the engine's first message; wait for an engine that starts."""
    transport = transport_to(address)
    while True:
        try:
            link = await transport.connect()
            session = Session(link)
            await session.receive()
            break
        except OSError:
            await asyncio.sleep(0.05)
    try:
        yield session
    finally:
        link.close()
        await transport.close()


class Session:
    """The simplest possible router's end."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self.hello: engine_pb2.EngineMessage | None = None
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, engine_pb2.Ended] = {}
        self.num_messages = 0
        self.load = None

    async def submit(self, first: int, prompt: list[int], max_tokens: int, *, n: int = 1, **fields: object) -> None:
        submit = engine_pb2.Submit(
            first_sequence=first,
            prompt=prompt,
            sampling=inference_pb2.Sampling(seed=1, n=n),
            max_tokens=max_tokens,
            **fields,  # type: ignore[arg-type]
        )
        await self.link.write(engine_pb2.RouterMessage(submit=submit))

    async def abort(self, *sequences: int) -> None:
        await self.link.write(engine_pb2.RouterMessage(abort=engine_pb2.Abort(sequences=sequences)))

    async def receive(self) -> engine_pb2.EngineMessage:
        message = await self.link.read()
        assert message is not None
        self.hello = self.hello or message
        self.num_messages += 1
        for sequence, token in zip(message.step.sequences, message.step.tokens, strict=True):
            self.tokens.setdefault(sequence, []).append(token)
        for ended in message.step.ended:
            self.ended[ended.sequence] = ended
        if message.step.HasField("load"):
            self.load = message.step.load
        return message

    async def receive_until_ended(self, *sequences: int) -> None:
        while not self.ended.keys() >= set(sequences):
            await self.receive()


@pytest.fixture
async def session(address: str) -> AsyncIterator[Session]:
    async with connected(address) as session:
        yield session


async def test_the_first_message_says_what_the_engine_holds(address: str) -> None:
    async with connected(address) as session:
        message = session.hello
        info = message.hello
        assert message.epoch == info.epoch != 0
        assert info.kv_cache.token_capacity == info.kv_cache.num_blocks * info.kv_cache.block_size
        assert info.kv_cache.total_bytes == info.kv_cache.token_capacity * info.kv_cache.bytes_per_token


async def test_many_sequences_stream_their_own_tokens(session: Session) -> None:
    for number in range(1, 41):
        await session.submit(number, [number, 7, number], max_tokens=10 + number)
    await session.receive_until_ended(*range(1, 41))
    for number in range(1, 41):
        assert session.tokens[number] == expected_tokens([number, 7, number], 10 + number, VOCAB_SIZE)
        assert session.ended[number].reason == engine_pb2.END_REASON_LENGTH


async def test_n_sequences_of_one_prompt_are_numbered_in_a_row(session: Session) -> None:
    await session.submit(100, [1, 2, 3], max_tokens=5, n=3)
    await session.receive_until_ended(100, 101, 102)
    assert {len(session.tokens[number]) for number in (100, 101, 102)} == {5}


async def test_a_start_is_told_before_the_first_token_and_once(session: Session) -> None:
    await session.submit(1, [1] * 2000, max_tokens=20, n=2)
    told: list[int] = []
    while not session.tokens.keys() >= {1, 2}:
        told += (await session.receive()).step.started
    assert sorted(told) == [1, 2]
    assert told[0] == 1, "its sibling starts from its prompt"
    await session.receive_until_ended(1, 2)


async def test_tenants_are_reported_when_they_change_and_not_with_every_step(session: Session) -> None:
    await session.submit(1, [91, 92, 93], max_tokens=200, tenant="ann")  # no other test has cached their beginning
    reports = []
    while 1 not in session.ended:
        step = (await session.receive()).step
        if step.HasField("tenants"):
            reports.append(step.tenants)
    assert 1 <= len(reports) < session.num_messages / 5
    (ann,) = [tenant for tenant in reports[-1].listed if tenant.name == "ann"]
    assert (ann.running, ann.service) == (0, 3 + 2 * 200)
    assert reports[-1].recent_service >= ann.service


async def test_a_router_without_sequences_gets_the_load_four_times_a_second(address: str, session: Session) -> None:
    async with connected(address) as other:

        async def receive() -> None:
            while True:
                await other.receive()

        began, receiving = time.monotonic(), asyncio.create_task(receive())
        await session.submit(1, [1, 2, 3], max_tokens=600)
        await session.receive_until_ended(1)
        took_s = time.monotonic() - began
        steps = session.load.steps
        async with asyncio.timeout(1):  # the last load comes, though no step follows it
            while other.load is None or other.load.steps < steps:  # noqa: ASYNC110 (the other task reads it)
                await asyncio.sleep(0.01)
        receiving.cancel()
        assert session.num_messages > 200, "a slow machine merges steps"
        assert 2 <= other.num_messages <= 4 * (took_s + 1) + 3, "hello, the load at its start, and no load of each step"


async def test_abort_ends_a_sequence_and_returns_every_block(session: Session) -> None:
    await session.submit(1, [5] * 100, max_tokens=5000)
    while len(session.tokens.get(1, [])) < 3:
        await session.receive()
    await session.abort(1, 999)
    await session.receive_until_ended(1)
    assert session.ended[1].reason == engine_pb2.END_REASON_ABORTED
    while session.load.blocks_referenced:
        await session.receive()
    assert session.load.blocks_free + session.load.blocks_evictable == session.load.blocks_total
    await session.abort(1)
    await session.submit(2, [1], max_tokens=1)
    await session.receive_until_ended(2)


async def test_a_deadline_ends_a_sequence(session: Session) -> None:
    await session.submit(1, [5], max_tokens=5000, timeout_s=0.05)
    await session.receive_until_ended(1)
    assert session.ended[1].reason == engine_pb2.END_REASON_DEADLINE


async def test_a_router_that_leaves_takes_its_sequences_with_it(address: str, session: Session) -> None:
    async with connected(address) as other:
        await other.submit(1, [9] * 50, max_tokens=20_000)
        while not other.tokens:
            await other.receive()
    await session.submit(1, [1, 2], max_tokens=200)
    await session.receive_until_ended(1)
    assert session.tokens[1] == expected_tokens([1, 2], 200, VOCAB_SIZE), (
        "another router's sequence 1 is another sequence"
    )
    assert (session.load.running, session.load.blocks_referenced) == (0, 0)


@pytest.mark.thorough
async def test_a_router_that_falls_behind_misses_nothing(session: Session) -> None:
    for number in range(32):
        await session.submit(number, [number], max_tokens=1000, logprobs=1)
    await asyncio.sleep(2.0)  # a megabyte unread: several rings full
    await session.receive_until_ended(*range(32))
    for number in range(32):
        assert session.tokens[number] == expected_tokens([number], 1000, VOCAB_SIZE)


async def test_flush_reports_how_many_blocks_became_free(session: Session) -> None:
    await session.submit(1, list(range(200)), max_tokens=1)
    await session.receive_until_ended(1)
    await session.link.write(engine_pb2.RouterMessage(flush_cache=engine_pb2.FlushCache()))
    while (message := await session.receive()).WhichOneof("message") != "cache_flushed":
        pass
    assert message.cache_flushed.freed_blocks >= 200 // 16


def test_pagoda_health_asks_an_engine_over_either_transport(address: str) -> None:
    for asked, expected in ((address, ("SERVING\n", 0)), (f"{address}.nobody", ("UNAVAILABLE\n", 1))):
        command = [sys.executable, "-m", "pagoda_server.cli", "health", "--address", asked]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert (result.stdout, result.returncode) == expected


def test_another_engine_on_its_socket_is_refused_and_it_serves_on(address: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pagoda_server.engine", "--listen", address, "--model", "synthetic"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert f"cannot bind {address}: Address already in use" in result.stderr
    command = [sys.executable, "-m", "pagoda_server.cli", "health", "--address", address]
    assert subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def test_the_socket_is_its_owners_alone(address: str) -> None:
    assert stat.S_IMODE(os.stat(address.partition(":")[2]).st_mode) == 0o600


@pytest.mark.parametrize("transport", ["unix", "shm"])
def test_sigterm_ends_an_engine_with_exit_code_zero_and_removes_its_socket(tmp_path: Path, transport: str) -> None:
    with running_engine(f"{transport}:{tmp_path / 's'}", "--model", "synthetic") as process:
        while not (tmp_path / "s").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--model", "nowhere/at-all/x"), "there is no model"),
        (("--model", "synthetic", "--token-budget", "8"), "--token-budget"),
        (("--model", "synthetic", "--block-size", "12"), "--block-size"),
        (("--model", "synthetic", "--listen", "127.0.0.1:99999"), "a port is from 0 to 65535"),
        (("--model", "synthetic", "--listen", "nonsense"), "is not shm:PATH, unix:PATH or HOST:PORT"),
        (("--model", "synthetic", "--listen", "127.example.com:50052"), "is reachable from other hosts"),
        (("--model", "synthetic", "--listen", "unix:/no/such/folder/s"), "No such file or directory"),
    ],
)
def test_a_wrong_setting_is_one_clear_line_and_exit_code_two(
    tmp_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pagoda_server.engine", "--listen", f"unix:{tmp_path / 's'}", *flags],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_a_public_address_is_refused_unless_forced() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pagoda_server.engine", "--listen", "0.0.0.0:0", "--model", "synthetic"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "--allow-insecure" in result.stderr
