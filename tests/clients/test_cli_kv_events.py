"""`pagoda kv-events`: ZeroMQ subscribers that come early, late and twice, and a server that goes away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import zmq

from pagoda.v1 import admin_pb2, admin_pb2_grpc
from pagoda_server.cli.kv_events import as_vllm
from pagoda_server.router.adapters.protocols import smg_common_pb2 as smg
from tests.router.adapters.test_kv_events import BLOCK, SYNTHETIC, complete, has_chain
from tests.servers import free_address, running_server

ONE, TWO = b"the first prompt of several", b"another prompt that comes later"


class Subscriber:
    """Keeps what vLLM's events say is cached."""

    def __init__(self, endpoint: str, *, listens: bool = False) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}  # hash → the hash before it, tokens
        self.num_cleared = 0
        self.topic = b""
        self._number: int | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.subscribe("kv@")
        self._socket.bind(endpoint) if listens else self._socket.connect(endpoint)

    def close(self) -> None:
        self._context.destroy()

    def take(self) -> None:
        self.topic, number, content = self._socket.recv_multipart()
        assert self._number is None or int.from_bytes(number, "big") == self._number + 1
        self._number = int.from_bytes(number, "big")
        _, events = msgspec.msgpack.decode(content)
        for kind, *rest in events:
            if kind == "AllBlocksCleared":
                self.blocks.clear()
                self.num_cleared += 1
            elif kind == "BlockRemoved":
                for key in rest[0]:
                    del self.blocks[key]
            else:
                hashes, before, tokens, size, adapter, medium = rest
                assert (size, adapter, medium, len(tokens)) == (BLOCK, None, "GPU", BLOCK * len(hashes))
                for at, key in enumerate(hashes):
                    self.blocks[key] = before, tokens[at * BLOCK : (at + 1) * BLOCK]
                    before = key

    def take_until(self, *prompts: bytes) -> None:
        while not all(map(self.has, prompts)):
            self.take()

    def has(self, prompt: bytes) -> bool:
        return has_chain(self.blocks, prompt)


@contextlib.contextmanager
def relay(*options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "pagoda_server.cli", "kv-events", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_subscribers_are_sent_what_is_cached_and_what_changes(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'events'}"
    with running_server(*SYNTHETIC) as server, relay("--bind", endpoint, "--address", server.address) as process:
        topic = f"kv@{server.address}@synthetic"
        assert first_line(process) == f"publishing what {server.address} has cached at {endpoint} as {topic}\n"
        early = Subscriber(endpoint)
        while not early.num_cleared:
            early.take()
        complete(server.address, ONE)
        early.take_until(ONE)
        assert early.topic == topic.encode()
        late = Subscriber(endpoint)
        late.take_until(ONE)
        complete(server.address, TWO)
        for each in (early, late):
            each.take_until(ONE, TWO)
        assert early.blocks == late.blocks
        with grpc.insecure_channel(server.address) as channel:
            admin_pb2_grpc.AdminStub(channel).FlushCache(admin_pb2.FlushCacheRequest())
        complete(server.address, TWO)  # the engine reports with its steps
        while early.has(ONE):
            early.take()
        early.take_until(TWO)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        early.close()
        late.close()


def test_a_server_that_goes_has_nothing_cached_and_one_that_is_back_is_followed_again(tmp_path: Path) -> None:
    listen, endpoint = free_address(), f"ipc://{tmp_path / 'events'}"
    subscriber = Subscriber(endpoint, listens=True)
    with contextlib.ExitStack() as stack:
        with running_server(*SYNTHETIC, "--listen", listen):
            process = stack.enter_context(relay("--connect", endpoint, "--address", listen, "--pod", "10.0.0.7:8000"))
            first_line(process)
            while not subscriber.num_cleared:
                subscriber.take()
            complete(listen, ONE)
            subscriber.take_until(ONE)
            num_cleared = subscriber.num_cleared
        while subscriber.num_cleared == num_cleared:  # its blocks may have gone before, with its engine
            subscriber.take()
        assert not subscriber.blocks
        with running_server(*SYNTHETIC, "--listen", listen):
            while subscriber.num_cleared == num_cleared + 1:  # an engine reports what it caches from then on
                subscriber.take()
            complete(listen, ONE)
            subscriber.take_until(ONE)
        assert subscriber.topic == b"kv@10.0.0.7:8000@synthetic"
    subscriber.close()


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        ((), 2, "give one of --bind and --connect"),
        (("--bind", "tcp://*:1", "--connect", "tcp://b:1"), 2, "give one of --bind and --connect"),
        (("--bind", "nonsense"), 1, "error: nonsense: Invalid argument"),
        (("--connect", "http://x"), 1, "error: http://x: Protocol not supported"),
        (("--bind", "ipc:///nowhere/at/all"), 1, "error: ipc:///nowhere/at/all: No such file or directory"),
        (("--bind", "ipc://@pagoda", "--address", "127.0.0.1:1"), 1, "127.0.0.1:1 is unavailable: "),
    ],
)
def test_what_cannot_work_is_said(options: tuple[str, ...], code: int, complaint: str) -> None:
    command = [sys.executable, "-m", "pagoda_server.cli", "kv-events", *options]
    environment = os.environ | {"COLUMNS": "200"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert ended.returncode == code, ended.stderr
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr


def test_blocks_of_two_sizes_are_two_events() -> None:
    stored = smg.KvBlocksStored(
        blocks=[
            smg.KvBlock(block_hash=-1, token_ids=[1, 2], block_size=2),
            smg.KvBlock(block_hash=5, token_ids=[3, 4], block_size=2),
            smg.KvBlock(block_hash=6, token_ids=[7], block_size=1),
        ]
    )
    found: list[list[Any]] = list(as_vllm(smg.KvCacheEvent(stored=stored)))
    assert found == [
        ["BlockStored", [2**64 - 1, 5], None, [1, 2, 3, 4], 2, None, "GPU"],
        ["BlockStored", [6], 5, [7], 1, None, "GPU"],
    ]
