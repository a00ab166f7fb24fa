"""Routers and engines are replaced while clients stream: no stream breaks, and no token changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import Answer, ask, request
from tests.servers import Server, running_engine, running_server

pytestmark = pytest.mark.timeout(180)

MODEL = ("--model", "synthetic")
ROUTERS = (*MODEL, "--workers", "2", "--max-connection-age-s", "1", "--http", "127.0.0.1:0")
TOKENS = 150
VOCAB = 258


class Clients:
    """Clients that open one stream after the other, each on a connection of its own, and check every token."""

    def __init__(self, server: Server) -> None:
        self.finished = 0
        self._server = server
        self._is_over = asyncio.Event()
        self._tasks: list[asyncio.Future[None]] = []

    @contextlib.asynccontextmanager
    async def streaming(self, count: int, over_http: int) -> AsyncIterator[None]:
        """Stream while the block runs, and until the streams that have begun are done."""
        self._tasks += [asyncio.create_task(self._grpc(number)) for number in range(count)]
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(max(over_http, 1))
        self._tasks += [loop.run_in_executor(threads, self._http) for _ in range(over_http)]
        try:
            yield
            self._is_over.set()
            await asyncio.gather(*self._tasks)
        finally:
            self._is_over.set()
            for task in self._tasks:
                task.cancel()
            threads.shutdown(wait=False)

    def check(self) -> None:
        """Raise what has ended a client."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _grpc(self, number: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._server.address, options=options) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            while not self._is_over.is_set():
                text = f"client {number}, stream {self.finished}"
                answer = Answer([each async for each in inference.Generate(request(text, TOKENS), timeout=100)])
                assert answer.ids() == expected_tokens(text.encode(), TOKENS, VOCAB)
                self.finished += 1

    def _http(self) -> None:
        asked = {"prompt": "over HTTP", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        texts = set()
        with contextlib.closing(HTTPConnection(self._server.http.removeprefix("http://"), timeout=100)) as connection:
            while not self._is_over.is_set():
                connection.request("POST", "/v1/completions", json.dumps(asked))
                response = connection.getresponse()
                assert response.status == 200
                lines = [line.removeprefix("data: ") for line in response.read().decode().split("\n") if line]
                assert lines[-1] == "[DONE]"
                texts.add("".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]))
                assert len(texts) == 1
                self.finished += 1


async def until(is_so: Callable[[], Any], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110 - what it asks about happens in other processes
            await asyncio.sleep(0.05)


async def replace_routers(server: Server) -> None:
    def count() -> int:
        return server.log.read_text().count("the routers have been replaced")

    before = count()
    server.process.send_signal(signal.SIGUSR2)
    await until(lambda: count() > before)


def routers(server: Server) -> set[int]:
    found = set()
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "pagoda_server.router.process.main" in child.cmdline():
                found.add(child.pid)
    return found


@pytest.mark.parametrize(("times", "count"), [(1, 8), pytest.param(3, 20, marks=pytest.mark.thorough)])
async def test_routers_are_replaced_under_streams_of_grpc_and_http(times: int, count: int) -> None:
    with running_server(*ROUTERS, "--step-ms", "5") as server:
        clients, first = Clients(server), routers(server)
        async with clients.streaming(count, over_http=count // 4):
            for _ in range(times):
                await asyncio.sleep(0.5)
                await replace_routers(server)
                clients.check()
        assert clients.finished >= count
        await until(lambda: len(routers(server)) == 2)
        assert not first & routers(server)
        assert server.stop() == 0


@pytest.mark.thorough
async def test_a_stream_of_a_retired_router_is_resumed_and_aborted_by_its_successors() -> None:
    with running_server(*ROUTERS, "--step-ms", "20") as server, grpc.insecure_channel(server.address) as channel:
        kept = request("kept", max_tokens=300)
        kept.request_id, kept.resumable = "kept", True
        call = inference_pb2_grpc.InferenceStub(channel).Generate(kept)
        seen = [next(call)]
        await replace_routers(server)
        with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            load = control_pb2_grpc.ControlStub(other).GetLoad(control_pb2.GetLoadRequest())
            assert load.requests == 1
            resume = inference_pb2.ResumeRequest(request_id="kept", received=[len(Answer(seen).ids())])
            rest = Answer(list(inference_pb2_grpc.InferenceStub(other).Resume(resume)))
        assert Answer(seen).ids() + rest.ids() == expected_tokens(b"kept", 300, VOCAB)


@pytest.mark.thorough
async def test_routers_that_cannot_start_leave_the_others_in_place(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with running_server(*MODEL, "--workers", "2", "--auth-token-file", str(token)) as server:
        before = routers(server)
        token.write_text("")
        server.process.send_signal(signal.SIGUSR2)
        await until(lambda: "the routers are not replaced: router" in server.log.read_text())
        await until(lambda: routers(server) == before)
        with grpc.insecure_channel(server.address) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            metadata = (("authorization", "Bearer secret"),)
            answer = Answer(list(inference.Generate(request("still", 5), metadata=metadata)))
            assert answer.ids() == expected_tokens(b"still", 5, VOCAB)
        token.write_text("secret\n")
        await replace_routers(server)
        await until(lambda: len(routers(server)) == 2 and not before & routers(server))
        assert server.stop() == 0


@pytest.mark.thorough
async def test_a_signal_to_end_also_ends_retired_routers_once_their_streams_have() -> None:
    with running_server(*ROUTERS, "--step-ms", "10") as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request("long", 900))
            responses = aiter(call)
            first = await anext(responses)
            await replace_routers(server)
            server.process.send_signal(signal.SIGTERM)
            answer = Answer([first, *[each async for each in responses]])
            assert answer.ids() == expected_tokens(b"long", 900, VOCAB)
        assert await asyncio.to_thread(server.process.wait, 60) == 0


@pytest.mark.thorough
def test_a_single_router_says_that_it_cannot_be_replaced_and_goes_on() -> None:
    with running_server(*MODEL) as server, grpc.insecure_channel(server.address) as channel:
        server.process.send_signal(signal.SIGUSR2)
        inference = inference_pb2_grpc.InferenceStub(channel)
        assert ask(inference, request("on", 5)).ids() == expected_tokens(b"on", 5, VOCAB)
        assert "SIGUSR2: only a server with --workers" in server.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_ten_replacements_of_engines_and_routers_break_none_of_200_streams(tmp_path: Path) -> None:
    engine = (*MODEL, "--step-ms", "10", "--max-num-seqs", "256", "--grace-s", "3")
    addresses = [f"unix:{tmp_path / str(place)}.sock" for place in range(3)]
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(running_engine(address, *engine)) for address in addresses]
        server = stack.enter_context(running_server(*ROUTERS, "--engine", ",".join(addresses)))

        def ready() -> int:
            with grpc.insecure_channel(server.address) as channel:
                return len(control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest()).engines)

        await until(lambda: ready() == 3)
        clients = Clients(server)
        async with clients.streaming(160, over_http=40):
            for at in range(10):
                await asyncio.sleep(1)
                await replace_routers(server)
                clients.check()
                place = at % 3
                engines[place].send_signal(signal.SIGKILL if at % 2 else signal.SIGTERM)
                await asyncio.to_thread(engines[place].wait, 30)
                engines[place] = stack.enter_context(running_engine(addresses[place], *engine))
                await until(lambda: ready() == 3)
                clients.check()
        assert clients.finished > 400
