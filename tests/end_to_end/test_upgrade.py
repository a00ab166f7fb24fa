"""Routers and engines are replaced while clients stream: no stream breaks, and no token changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
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
from tests.servers import ROOT, Server, running_engine, running_server

pytestmark = pytest.mark.timeout(180)

MODEL = ("--model", "synthetic")
SOON = ("--max-connection-age-s", "1")  # after which a router that was replaced ends
ONE = (*MODEL, *SOON, "--http", "127.0.0.1:0")
ROUTERS = (*ONE, "--workers", "2")
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
    with running_server(*MODEL, *SOON, "--workers", "2", "--auth-token-file", str(token)) as server:
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


def upgrade(*arguments: str) -> tuple[int, str, str]:
    """Run `pagoda upgrade`; its exit code and what it prints."""
    command = [sys.executable, "-m", "pagoda_server.cli", "upgrade", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("at", ["tcp", pytest.param("unix", marks=pytest.mark.thorough)])
async def test_a_server_of_one_router_is_upgraded_with_its_engine(at: str, tmp_path: Path) -> None:
    listen = ("--listen", f"unix:{tmp_path}/server") if at == "unix" else ()
    with running_server(*ONE, *listen, "--step-ms", "5") as server:
        clients = Clients(server)
        engine, pid = server.engine(), str(server.process.pid)
        async with clients.streaming(6, over_http=2):
            await asyncio.sleep(0.5)
            code, said, wrong = await asyncio.to_thread(upgrade, pid)
            assert (code, wrong, said[:8]) == (0, "", "replaced")
            assert len(routers(server)) == 1, "the first router was this process itself"
            finished = clients.finished
            await until(lambda: clients.finished > finished + 12)
            clients.check()
        await until(lambda: not engine.is_running())
        assert server.engine().pid != engine.pid
        first = routers(server)
        assert (await asyncio.to_thread(upgrade, "--routers", pid))[0] == 0
        with grpc.insecure_channel(server.address) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            assert ask(inference, request("on", 5)).ids() == expected_tokens(b"on", 5, VOCAB)
        await until(lambda: len(routers(server)) == 1 and not first & routers(server))
        assert server.engine().is_running()
        assert await asyncio.to_thread(server.stop) == 0


@pytest.mark.thorough
async def test_an_upgrade_serves_the_code_that_is_installed_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "pagoda_server"
    shutil.copytree(ROOT / "src/pagoda_server", package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running_server(*ONE, "--step-ms", "5") as server, grpc.insecure_channel(server.address) as channel:

        def version() -> str:
            info = control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())
            return str(info.version)

        before, clients = version(), Clients(server)
        with (package / "__init__.py").open("a") as code:
            code.write("\n\ndef installed_version() -> str:\n    return 'new'\n")
        with (package / "engine/__init__.py").open("a") as code:
            code.write("\nprint('a new engine', file=__import__('sys').stderr)\n")
        with (package / "router/process/workers.py").open("a") as code:
            code.write("\nprint('a new first process', file=__import__('sys').stderr)\n")
        pid, engine = str(server.process.pid), server.engine()
        async with clients.streaming(4, over_http=2):
            assert version() == before != "new"
            assert (await asyncio.to_thread(upgrade, pid))[0] == 0
            await until(lambda: version() == "new")
            await until(lambda: "router 0 goes on, pid" in server.log.read_text())
            finished, replaced = clients.finished, server.engine()
            await until(lambda: clients.finished > finished + 12)
            clients.check()
            assert replaced.pid != engine.pid
            assert "a new first process" in server.log.read_text().partition("goes on in the code")[2]
        # It looks after the processes that it has been left, and replaces them in its turn.
        replaced.kill()
        await until(lambda: any(each.pid != replaced.pid for each in server.engines()))
        (router,) = routers(server)
        server.wait_ready()
        assert (await asyncio.to_thread(upgrade, pid))[0] == 0
        await until(lambda: routers(server) and router not in routers(server))
        await until(lambda: server.log.read_text().count("router 0 goes on, pid") == 2)
        assert version() == "new"
        assert await asyncio.to_thread(server.stop) == 0


@pytest.mark.thorough
async def test_what_cannot_be_upgraded_goes_on_and_the_command_says_why(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    metadata = (("authorization", "Bearer secret"),)
    arguments = (*ONE, "--auth-token-file", str(token))
    with running_server(*arguments) as server, grpc.insecure_channel(server.address) as channel:
        inference, pid = inference_pb2_grpc.InferenceStub(channel), str(server.process.pid)
        engine = server.engine()
        token.write_text("")
        code, said, wrong = await asyncio.to_thread(upgrade, pid)
        assert (code, said) == (1, "")
        assert "not replaced: router 0" in wrong
        await until(lambda: len(server.engines()) == 1)
        assert server.engine().pid == engine.pid, "the new engine has ended again"
        token.write_text("secret\n")
        call = inference.Generate(request("long", 2000), metadata=metadata)
        next(call)
        assert (await asyncio.to_thread(upgrade, pid))[0] == 0
        code, _, wrong = await asyncio.to_thread(upgrade, pid)
        assert code == 1
        assert "an engine that was replaced before still runs streams" in wrong
        call.cancel()
        answer = Answer(list(inference.Generate(request("still", 5), metadata=metadata)))
        assert answer.ids() == expected_tokens(b"still", 5, VOCAB)
    code, _, wrong = await asyncio.to_thread(upgrade, pid)
    assert code == 2
    assert f"process {pid} is no `pagoda serve` here" in wrong


@pytest.mark.thorough
async def test_a_router_that_is_started_again_listens_once_it_has_an_engine(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(running_engine(address, *MODEL))
        server = stack.enter_context(running_server(*MODEL, "--workers", "2", "--engine", address))
        port = int(server.address.rpartition(":")[2])

        def listening() -> set[int]:
            found = set()
            for pid in routers(server):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    links = psutil.Process(pid).net_connections("tcp")
                    if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in links):
                        found.add(pid)
            return found

        before = listening()
        assert len(before) == 2
        engine.kill()
        killed = min(before)
        psutil.Process(killed).kill()
        await until(lambda: len(routers(server) - {killed}) == 2)
        await asyncio.sleep(5)  # in which a router starts
        assert listening() == before - {killed}, "calls do not reach a router that has no engine"
        stack.enter_context(running_engine(address, *MODEL))
        await until(lambda: len(listening()) == 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_calls_on_old_connections_outlast_the_routers_with_every_default() -> None:
    """Ten replacements, and as long as it takes until the last router of these has ended."""
    with running_server(*MODEL, "--workers", "2", "--http", "127.0.0.1:0", "--step-ms", "2") as server:
        clients = Clients(server)
        async with clients.streaming(16, over_http=4):
            for _ in range(10):
                await asyncio.sleep(1)
                await replace_routers(server)
                clients.check()
            await until(lambda: len(routers(server)) == 2, 200)
            await asyncio.sleep(2)
            clients.check()
        assert clients.finished > 400


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
