"""The channel as a router sees it: a real engine process with the synthetic model, on a real Unix socket."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from engine.synthetic import expected_tokens
from protos import engine_pb2, engine_pb2_grpc, inference_pb2
from tests.engine.harness import VOCAB_SIZE
from tests.servers import running_engine


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    listen = f"unix:{tmp_path_factory.mktemp('channel') / 'engine.sock'}"
    with running_engine(listen, "--model", "synthetic", "--step-ms", "1", "--max-num-seqs", "32"):
        yield listen


class Link:
    """A router's end, as bare as it gets."""

    def __init__(self, call: grpc.aio.StreamStreamCall[engine_pb2.RouterMessage, engine_pb2.EngineMessage]) -> None:
        self.call = call
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, engine_pb2.Ended] = {}
        self.numbers: list[int] = []
        self.load = None

    async def submit(self, first: int, prompt: list[int], max_tokens: int, *, n: int = 1, **fields: object) -> None:
        submit = engine_pb2.Submit(
            first_sequence=first,
            prompt=prompt,
            sampling=inference_pb2.Sampling(seed=1, n=n),
            max_tokens=max_tokens,
            **fields,  # type: ignore[arg-type]
        )
        await self.call.write(engine_pb2.RouterMessage(submit=submit))

    async def abort(self, *sequences: int) -> None:
        await self.call.write(engine_pb2.RouterMessage(abort=engine_pb2.Abort(sequences=sequences)))

    async def receive(self) -> engine_pb2.EngineMessage:
        message = await self.call.read()
        assert message is not grpc.aio.EOF
        self.numbers.append(message.number)
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
async def link(address: str) -> AsyncIterator[Link]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = engine_pb2_grpc.EngineStub(channel).Connect(wait_for_ready=True)
        link = Link(call)
        await link.receive()
        yield link
        call.cancel()


async def test_the_first_message_says_what_the_engine_holds(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call = engine_pb2_grpc.EngineStub(channel).Connect(wait_for_ready=True)
        message = await call.read()
        info = message.hello
        assert message.number == 0
        assert message.epoch == info.epoch != 0
        assert info.kv_cache.token_capacity == info.kv_cache.num_blocks * info.kv_cache.block_size
        assert info.kv_cache.total_bytes == info.kv_cache.token_capacity * info.kv_cache.bytes_per_token
        call.cancel()


async def test_many_sequences_stream_their_own_tokens(link: Link) -> None:
    for number in range(1, 41):
        await link.submit(number, [number, 7, number], max_tokens=10 + number)
    await link.receive_until_ended(*range(1, 41))
    for number in range(1, 41):
        assert link.tokens[number] == expected_tokens([number, 7, number], 10 + number, VOCAB_SIZE)
        assert link.ended[number].reason == engine_pb2.END_REASON_LENGTH
    assert link.numbers == list(range(len(link.numbers)))


async def test_n_sequences_of_one_prompt_are_numbered_in_a_row(link: Link) -> None:
    await link.submit(100, [1, 2, 3], max_tokens=5, n=3)
    await link.receive_until_ended(100, 101, 102)
    assert {len(link.tokens[number]) for number in (100, 101, 102)} == {5}


async def test_abort_ends_a_sequence_and_returns_every_block(link: Link) -> None:
    await link.submit(1, [5] * 100, max_tokens=5000)
    while len(link.tokens.get(1, [])) < 3:
        await link.receive()
    await link.abort(1, 999)
    await link.receive_until_ended(1)
    assert link.ended[1].reason == engine_pb2.END_REASON_ABORTED
    while link.load.blocks_referenced:
        await link.receive()
    assert link.load.blocks_free + link.load.blocks_evictable == link.load.blocks_total
    await link.abort(1)
    await link.submit(2, [1], max_tokens=1)
    await link.receive_until_ended(2)


async def test_a_deadline_ends_a_sequence(link: Link) -> None:
    await link.submit(1, [5], max_tokens=5000, timeout_s=0.05)
    await link.receive_until_ended(1)
    assert link.ended[1].reason == engine_pb2.END_REASON_DEADLINE


async def test_a_router_that_leaves_takes_its_sequences_with_it(address: str, link: Link) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call = engine_pb2_grpc.EngineStub(channel).Connect()
        other = Link(call)
        await other.receive()
        await other.submit(1, [9] * 50, max_tokens=20_000)
        while not other.tokens:
            await other.receive()
        call.cancel()
    await link.submit(1, [1, 2], max_tokens=200)
    await link.receive_until_ended(1)
    assert link.tokens[1] == expected_tokens([1, 2], 200, VOCAB_SIZE), "another router's sequence 1 is another sequence"
    assert (link.load.running, link.load.blocks_referenced) == (0, 0)


async def test_a_slow_router_gets_the_steps_it_missed_as_one_message(link: Link) -> None:
    await link.submit(1, [3], max_tokens=300)
    await asyncio.sleep(1.0)  # unread messages fill the socket's window, then gather
    await link.receive_until_ended(1)
    assert link.tokens[1] == expected_tokens([3], 300, VOCAB_SIZE)


async def test_flush_reports_how_many_blocks_became_free(link: Link) -> None:
    await link.submit(1, list(range(200)), max_tokens=1)
    await link.receive_until_ended(1)
    await link.call.write(engine_pb2.RouterMessage(flush_cache=engine_pb2.FlushCache()))
    while (message := await link.receive()).WhichOneof("message") != "cache_flushed":
        pass
    assert message.cache_flushed.freed_blocks >= 200 // 16


def test_the_socket_is_its_owners_alone(address: str) -> None:
    assert stat.S_IMODE(os.stat(Path(address.removeprefix("unix:"))).st_mode) == 0o600


def test_sigterm_ends_an_engine_with_exit_code_zero(tmp_path: Path) -> None:
    with running_engine(f"unix:{tmp_path / 's'}", "--model", "synthetic") as process:
        while not (tmp_path / "s").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--model", "nowhere/at-all/x"), "there is no model"),
        (("--model", "synthetic", "--token-budget", "8"), "--token-budget"),
        (("--model", "synthetic", "--block-size", "12"), "--block-size"),
    ],
)
def test_a_wrong_setting_is_one_clear_line_and_exit_code_two(
    tmp_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "engine", "--listen", f"unix:{tmp_path / 's'}", *flags],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_a_public_address_is_refused_unless_forced() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "engine", "--listen", "0.0.0.0:0", "--model", "synthetic"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "--allow-insecure" in result.stderr
