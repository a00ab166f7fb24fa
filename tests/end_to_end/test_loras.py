"""Adapters that an operator loads, over every protocol, on one engine or several, behind one router or several."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.router.adapters.protocols import kserve_pb2
from pagoda_server.settings import EXIT_CONFIG
from tests.end_to_end.adapter_proxy import MAX_LOADED, AdapterProxy
from tests.end_to_end.asking import Answer, request
from tests.servers import ROOT, Server, running_engine, running_server

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

MODEL = ("--model", "synthetic")
TOKENS = {"acme": [], "brown": [], "loaders": ["admin"], "operators": ["admin", "observe", "act_for_tenants"]}
TENANTS = '[tenant.acme]\nadapters = ["pirate"]\n[tenant.brown]\nadapters = []\n' + "".join(
    f'[[token]]\nsha256 = "{hashlib.sha256(f"token of {name}".encode()).hexdigest()}"\n'
    f'tenant = "{name}"\nrights = {json.dumps(rights)}\n'
    for name, rights in TOKENS.items()
)


def adapter(folder: Path, content: str) -> bytes:
    """Write an adapter, and return its identity."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (folder / "adapter_model.safetensors").write_text(content)
    return hashlib.sha256(content.encode()).digest()


def load(name: str, path: str, **more: Any) -> admin_pb2.LoadLoraRequest:
    return admin_pb2.LoadLoraRequest(lora_name=name, lora_path=path, **more)


@dataclass
class Fleet:
    """A server, and its engines behind proxies."""

    folder: Path
    server: Server
    proxies: list[AdapterProxy]
    engines: list[Any]
    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...] = ()
    identities: dict[str, bytes] = field(default_factory=dict)

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def admin(self) -> admin_pb2_grpc.AdminStub:
        return admin_pb2_grpc.AdminStub(self.channel)

    def by(self, tenant: str) -> Fleet:
        token = (("authorization", f"Bearer token of {tenant}"),)
        return Fleet(self.folder, self.server, self.proxies, self.engines, self.channel, token, self.identities)

    async def load(self, name: str, path: str, **more: Any) -> control_pb2.LoraAdapter:
        response = await self.admin.LoadLora(load(name, path, **more), timeout=60, metadata=self.metadata)
        return response.adapter

    async def unload(self, name: str) -> None:
        await self.admin.UnloadLora(admin_pb2.UnloadLoraRequest(lora_name=name), timeout=60, metadata=self.metadata)

    async def loras(self) -> dict[str, control_pb2.LoraAdapter]:
        listed = await self.admin.ListLoras(admin_pb2.ListLorasRequest(), timeout=60, metadata=self.metadata)
        return {each.name: each for each in listed.adapters}

    async def listed(self) -> list[str]:
        stub = control_pb2_grpc.ControlStub(self.channel)
        answer = await stub.ListModels(control_pb2.ListModelsRequest(), timeout=60, metadata=self.metadata)
        return [each.name for model in answer.models for each in model.adapters]

    async def ask(self, tokens: int = 3, **fields: Any) -> Answer:
        asked = request("once", tokens)
        for name, value in fields.items():
            setattr(asked, name, value)
        call = self.inference.Generate(asked, timeout=60, metadata=self.metadata)
        return Answer([response async for response in call])

    async def http(self, path: str, body: object = None) -> tuple[int, Any]:
        headers = {name: value for name, value in self.metadata if name == "authorization"}

        def post() -> tuple[int, Any]:
            data = None if body is None else json.dumps(body).encode()
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(self.server.http + path, data, headers), timeout=60
                ) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)

        return await asyncio.to_thread(post)


async def until(is_so: Callable[[], Any], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not (found := is_so()) or (asyncio.iscoroutine(found) and not await found):  # noqa: ASYNC110 - processes
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def fleet(
    folder: Path,
    *arguments: str,
    engines: int = 1,
    token: str = "",
    declares: Sequence[str] = (),
    has_proxies: bool = True,
) -> AsyncIterator[Fleet]:
    """A server with adapters `one` and `two` in its folder, and engines that are ready."""
    loras = folder / "loras"
    loras.mkdir()
    identities = {name: adapter(loras / name, name) for name in ("one", "two")}
    declared = ("--lora", ",".join(f"{each}={loras / each}" for each in declares)) if declares else ()
    async with contextlib.AsyncExitStack() as stack:
        proxies, processes, listed = [], [], []
        for at in range(engines):
            address, seen = f"unix:{folder}/{at}.sock", f"unix:{folder}/{at}.proxy"
            processes.append(stack.enter_context(running_engine(address, *MODEL, "--step-ms", "5")))
            if has_proxies:
                proxies.append(await stack.enter_async_context(AdapterProxy(seen, address).running()))
            listed.append(f"e{at}={seen if has_proxies else address}")
        where = ("--engine", ",".join(listed), "--lora-dir", str(loras), "--http", "127.0.0.1:0")
        starting = running_server(*MODEL, *where, *declared, *arguments, ready=False)
        server = await asyncio.to_thread(stack.enter_context, starting)
        await asyncio.to_thread(server.wait_ready, checks=12 if "--workers" in arguments else 1)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
        found = Fleet(loras, server, proxies, processes, channel, identities=identities)
        control = control_pb2_grpc.ControlStub(channel)
        metadata = (("authorization", f"Bearer token of {token}"),) if token else ()

        async def all_are_ready() -> bool:
            load = await control.GetLoad(control_pb2.GetLoadRequest(), metadata=metadata)
            return len(load.engines) == engines

        await until(all_are_ready)
        yield found


@contextlib.asynccontextmanager
async def router_beside(server: Fleet, folder: Path, ends: str, engines: int) -> AsyncIterator[Fleet]:
    """Another router of the same engines, which lists them in another order. Their addresses have these ends."""
    listed = ",".join(f"e{at}=unix:{folder}/{at}.{ends}" for at in reversed(range(engines)))
    starting = running_server(*MODEL, "--engine", listed, "--lora-dir", str(server.folder), ready=False)
    with contextlib.ExitStack() as stack:
        other = await asyncio.to_thread(stack.enter_context, starting)
        await asyncio.to_thread(other.wait_ready)
        async with grpc.aio.insecure_channel(other.address) as channel:
            yield Fleet(server.folder, other, server.proxies, [], channel)


async def pagoda(*arguments: str) -> tuple[int, str]:
    """The exit code of a command, and what it has printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagoda_server.cli", *arguments,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    printed, _ = await process.communicate()
    return process.returncode or 0, printed.decode()


@contextlib.contextmanager
def refused(code: grpc.StatusCode, *words: str) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        yield caught
    assert caught.value.code() is code, caught.value
    for word in words:
        assert word in caught.value.details()


NOT_FOUND, INVALID = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT
EXISTS, EXHAUSTED = grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_adapter_is_loaded_named_by_every_protocol_and_unloaded(tmp_path: Path) -> None:
    async with fleet(tmp_path) as server:
        (proxy,) = server.proxies
        with refused(NOT_FOUND, "lora_name"):
            await server.ask(lora_name="sql")
        loaded = await server.load("sql", "one")
        assert (loaded.name, loaded.model, loaded.rank, loaded.ready) == ("sql", "synthetic", 8, True)
        assert bytes.fromhex(loaded.identity) == server.identities["one"]
        assert list(loaded.engines) == ["e0"]
        assert await server.listed() == ["sql"]

        message = [{"role": "user", "content": "x"}]
        asks: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
            ("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": message, "max_tokens": 2}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
            ("/v1/messages", {"messages": message, "max_tokens": 2}),
            ("/v1/embeddings", {"input": "x"}),
        ]
        for path, body in asks:
            before = proxy.submitted[server.identities["one"]]
            status, answer = await server.http(path, body | {"model": "sql"})
            assert (status, answer["model"]) == (200, "sql"), path
            assert proxy.submitted[server.identities["one"]] > before, path
            assert (await server.http(path, body | {"model": "gone"}))[0] == 404
        await server.ask(lora_name="sql")
        await server.ask(model="sql")
        await server.ask(model="sql", lora_name="sql")
        await server.ask(model="synthetic", lora_name="sql")
        inputs = [inference_pb2.EmbedInput(text="x")]
        await server.inference.Embed(inference_pb2.EmbedRequest(inputs=inputs, lora_name="sql"), timeout=60)
        scored = inference_pb2.ScoreRequest(prompt="x", lora_name="sql")
        scored.continuations.add(text="y")
        await server.inference.Score(scored, timeout=60)
        infer = kserve_pb2.ModelInferRequest(model_name="sql")
        tensor = infer.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(b"x")
        infer.parameters["max_tokens"].int64_param = 2
        for method, asked, kind in (
            ("ModelInfer", infer, kserve_pb2.ModelInferResponse),
            ("ModelReady", kserve_pb2.ModelReadyRequest(name="sql"), kserve_pb2.ModelReadyResponse),
        ):
            call = server.channel.unary_unary(
                f"/inference.GRPCInferenceService/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=kind.FromString,
            )
            answer = await call(asked, timeout=60)
            assert method == "ModelInfer" or answer.ready
        status, models = await server.http("/v1/models")
        assert [(each["id"], each.get("parent")) for each in models["data"]] == [
            ("synthetic", None),
            ("sql", "synthetic"),
        ]
        assert (await server.http("/v1/models/sql"))[0] == 200
        assert (await server.http("/tokenize", {"model": "sql", "prompt": "x"}))[0] == 200
        before = proxy.submitted.copy()
        await server.ask()
        assert proxy.submitted == before, "a request of the base model has no adapter"

        await server.unload("sql")
        assert (await server.listed(), proxy.held) == ([], {})
        for fields in ({"model": "sql"}, {"lora_name": "sql"}):
            with refused(NOT_FOUND):
                await server.ask(**fields)
        with refused(NOT_FOUND, "lora_name"):
            await server.unload("sql")


async def test_tokens_are_those_of_the_adapter_on_every_engine_after_it_was_replaced_and_after_a_loss(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, engines=2, has_proxies=False) as server:

        def expected(count: int, adapter: control_pb2.LoraAdapter | None) -> list[int]:
            identity = bytes.fromhex(adapter.identity) if adapter else b""
            return expected_tokens(b"once", count, 258, identity)

        async def all_are(count: int, adapter: control_pb2.LoraAdapter | None, **fields: str) -> None:
            answers = await asyncio.gather(*(server.ask(count, **fields) for _ in range(8)))
            assert all(each.ids() == expected(count, adapter) for each in answers)

        one = await server.load("a", "one")
        two = await server.load("b", "two")
        for _ in range(2):  # the second time from the prefix cache
            await all_are(9, None)
            await all_are(9, one, model="a")
            await all_are(9, two, lora_name="b")
        asked = _named(400, "a", "long")
        stream = aiter(server.inference.Generate(asked, timeout=100))
        received = [await anext(stream)]
        replaced = await server.load("a", "two", replace=True)
        assert (replaced.identity, replaced.engines) == (two.identity, ["e0", "e1"])
        await all_are(9, two, model="a")
        received += [response async for response in stream]
        assert Answer(received).ids() == expected(400, one), "what has begun goes on with what it began with"

        stream = aiter(server.inference.Generate(_named(400, "b", "lost"), timeout=100))
        received = [await anext(stream)]
        load = await control_pb2_grpc.ControlStub(server.channel).GetLoad(control_pb2.GetLoadRequest())
        server.engines[next(each.engine for each in load.engines if each.running)].kill()
        received += [response async for response in stream]
        assert Answer(received).ids() == expected(400, two)


async def test_running_requests_finish_when_their_adapter_is_unloaded_or_replaced(tmp_path: Path) -> None:
    async with fleet(tmp_path) as server:
        await server.load("a", "one")
        first, second = (asyncio.create_task(server.ask(200, model="a")) for _ in range(2))
        await until(lambda: server.proxies[0].submitted[server.identities["one"]] == 2)
        with refused(EXISTS, "replace"):
            await server.load("a", "two")
        replaced = await server.load("a", "two", replace=True)
        assert bytes.fromhex(replaced.identity) == server.identities["two"]
        await server.ask(model="a")
        assert server.proxies[0].submitted[server.identities["two"]] == 1
        await server.unload("a")
        assert [len((await each).ids()) for each in (first, second)] == [200, 200]


async def test_paths_and_names_that_a_client_must_not_give_are_refused_before_an_engine_hears_of_them(
    tmp_path: Path,
) -> None:
    adapter(tmp_path / "outside", "outside")
    async with fleet(tmp_path) as server:
        (server.folder / "link").symlink_to(tmp_path / "outside")
        inside = server.folder / "files"
        inside.mkdir()
        (inside / "adapter_config.json").write_text("{}")
        (inside / "adapter_model.safetensors").symlink_to(tmp_path / "outside" / "adapter_model.safetensors")
        circle = server.folder / "circle"
        circle.symlink_to(circle)
        out = ("..", "../outside", "one/../../outside", "/etc", str(tmp_path / "outside"), "link", "files")
        for path in out:
            with refused(INVALID, "lora_path", "leads out"):
                await server.load("a", path)
            status, answer = await server.http("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path})
            assert (status, answer["error"]["param"]) == (400, "lora_path"), path
        for path in ("", "x" * 5000, "a\0b", "a\nb"):
            with refused(INVALID, "lora_path"):
                await server.load("a", path)
        for path in ("missing", "circle", "one/adapter_config.json/x"):
            with refused(NOT_FOUND, "lora_path"):
                await server.load("a", path)
        names = ("", "x" * 129, "x" * 10_000, "a\nb", "a\0", "\x1b[2J")
        for name in (*names, "synthetic"):
            with refused(INVALID, "lora_name"):
                await server.load(name, "one")
        for name in names:
            with refused(INVALID, "lora_name"):
                await server.unload(name)
            assert (await server.http("/v1/unload_lora_adapter", {"lora_name": name}))[0] == 400
            for fields in ({"model": name or "none"}, {"lora_name": name or "none"}):
                with refused(NOT_FOUND) as caught:
                    await server.ask(**fields)
                assert len(caught.value.details()) < 200, "it does not come back"
        with refused(NOT_FOUND, "model"):
            await server.load("a", "one", model="other")
        for body in ({}, {"lora_name": 5}, {"lora_name": "a", "lora_path": "one", "rank": 3}, {"lora_name": "\ud800"}):
            assert (await server.http("/v1/load_lora_adapter", body))[0] == 400
        assert (await server.http("/v1/unload_lora_adapter", {"lora_name": "a"}))[0] == 404
        assert not server.proxies[0].loads
        # Names of 128 characters, and paths that are absolute and inside, are in order.
        await server.load("é" * 128, str(server.folder / "one"))
        await server.load("../a/b%2f?c#d", "one")
        status, _ = await server.http("/v1/completions", {"model": "../a/b%2f?c#d", "prompt": "x", "max_tokens": 1})
        assert status == 200
        await server.unload("../a/b%2f?c#d")
        status, _ = await server.http("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": "two/../two"})
        assert status == 200
        assert sorted(await server.listed()) == ["b", "é" * 128]
        with refused(INVALID, "lora_name"):
            await server.ask(model="b", lora_name="é" * 128)


@pytest.mark.parametrize("engines", [1, 2])
async def test_of_two_routers_that_load_a_name_at_once_one_gets_it_on_every_engine(
    tmp_path: Path, engines: int
) -> None:
    async with (
        fleet(tmp_path, engines=engines, has_proxies=False) as server,
        router_beside(server, tmp_path, "sock", engines) as second,
    ):

        async def both_hold(name: str, identity: bytes) -> bool:
            found = [(await each.loras()).get(name) for each in (server, second)]
            return all(
                each is not None and bytes.fromhex(each.identity) == identity and len(each.engines) == engines
                for each in found
            )

        ready = await second.load("ready", "one")
        await until(lambda: both_hold("ready", bytes.fromhex(ready.identity)))
        for turn in range(6):
            asked = [(server, "one"), (second, "two")][:: 1 if turn % 2 else -1]
            calls = (each.load(f"a{turn}", path) for each, path in asked)
            results = await asyncio.gather(*calls, return_exceptions=True)
            (won,) = [each for each in results if isinstance(each, control_pb2.LoraAdapter)]
            (lost,) = [each for each in results if isinstance(each, grpc.RpcError)]
            assert (lost.code(), won.identity in lost.details()) == (EXISTS, True)
            identity = bytes.fromhex(won.identity)
            await until(lambda name=f"a{turn}", identity=identity: both_hold(name, identity))
            calls = (each.load(f"b{turn}", path) for each, path in ((server, "one"), (second, "one")))
            assert len({each.identity for each in await asyncio.gather(*calls)}) == 1, "the same bytes"
        with refused(EXISTS, ready.identity):
            await second.load("ready", "two")
        for turn in range(6):
            await server.unload(f"a{turn}")
            await second.load(f"a{turn}", "two")
            await server.unload(f"a{turn}")
        assert not {f"a{turn}" for turn in range(6)} & (await server.loras()).keys()


async def test_a_router_unloads_what_another_one_has_loaded_just_now(tmp_path: Path) -> None:
    async with fleet(tmp_path, engines=2) as server, router_beside(server, tmp_path, "proxy", 2) as second:
        for proxy in server.proxies:
            proxy.is_silent = True
        await server.load("a", "one")
        assert await second.loras() == {}, "it has not heard of it"
        await second.unload("a")
        assert [proxy.held for proxy in server.proxies] == [{}, {}]
        with refused(NOT_FOUND, "lora_name"):
            await second.unload("a")
        for proxy in server.proxies:
            proxy.is_silent = False
            proxy.report()

        async def nothing_is_left() -> bool:
            return not await server.loras()

        await until(nothing_is_left)
        with refused(NOT_FOUND):
            await server.ask(model="a")


async def test_a_flood_of_loads_is_refused_and_disturbs_no_stream(tmp_path: Path) -> None:
    async with fleet(tmp_path) as server:
        (proxy,) = server.proxies
        stream = asyncio.create_task(server.ask(300))
        proxy.may_load.clear()
        calls = [asyncio.create_task(server.load(f"a{at}", "one", replace=True)) for at in range(40)]
        await until(lambda: sum(call.done() for call in calls) >= 40 - 17)
        proxy.may_load.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        codes = [each.code() if isinstance(each, grpc.RpcError) else None for each in results]
        assert codes.count(None) == MAX_LOADED, "as many as the engine holds"
        assert set(codes) == {None, EXHAUSTED}
        assert len((await stream).ids()) == 300
        assert len(await server.loras()) == MAX_LOADED
        with refused(EXHAUSTED, "adapters are loaded") as caught:
            await server.load("more", "one")
        assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "60000"


async def test_a_tenant_finds_and_names_its_own_adapters_alone(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS)
    async with fleet(tmp_path, "--tenants-file", str(path), token="operators") as server:
        operators, acme, brown = (server.by(name) for name in ("operators", "acme", "brown"))
        denied = grpc.StatusCode.PERMISSION_DENIED
        with refused(denied, "admin"):
            await acme.load("pirate", "one")
        with refused(denied, "admin"):
            await acme.unload("pirate")
        with refused(denied, "admin"):
            await acme.loras()
        for route in ("load", "unload"):
            status, _ = await acme.http(f"/v1/{route}_lora_adapter", {"lora_name": "pirate", "lora_path": "one"})
            assert status == 403
        await operators.load("pirate", "one")
        await operators.load("secret", "two")
        assert (await acme.listed(), await brown.listed()) == (["pirate"], [])
        assert await operators.listed() == ["pirate", "secret"]
        await acme.ask(model="pirate")
        unknown = [(acme, "secret"), (brown, "pirate"), (brown, "secret"), (brown, "nothing")]
        texts = set()
        for tenant, name in unknown:
            with refused(NOT_FOUND) as caught:
                await tenant.ask(lora_name=name)
            texts.add(caught.value.details())
            with refused(NOT_FOUND):
                await tenant.ask(model=name)
            body = {"model": name, "prompt": "x" * 300_000, "max_tokens": 1}  # so large that a thread parses it
            assert (await tenant.http("/v1/completions", body))[0] == 404
            assert (await tenant.http(f"/v1/models/{name}"))[0] == 404
            assert (await tenant.http("/tokenize", {"model": name, "prompt": "x"}))[0] == 404
            embedding = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="x")], lora_name=name)
            with refused(NOT_FOUND):
                await tenant.inference.Embed(embedding, timeout=60, metadata=tenant.metadata)
            ready = server.channel.unary_unary(
                "/inference.GRPCInferenceService/ModelReady",
                request_serializer=kserve_pb2.ModelReadyRequest.SerializeToString,
                response_deserializer=kserve_pb2.ModelReadyResponse.FromString,
            )
            assert not (await ready(kserve_pb2.ModelReadyRequest(name=name), metadata=tenant.metadata)).ready
        assert len(texts) == 1, "an adapter of others looks like one that is not there"
        where = ("--address", server.server.address)
        code, printed = await pagoda("lora", "list", *where, "--token", "token of loaders")
        assert (code, [line.split()[-1] for line in printed.splitlines()]) == (0, ["Engines", "loaded", "loaded"])
        code, printed = await pagoda("lora", "list", *where, "--token", "token of operators")
        assert (code, [line.split()[-1] for line in printed.splitlines()]) == (0, ["Engines", "e0", "e0"])
        acting = Fleet(
            server.folder, server.server, server.proxies, server.engines, server.channel,
            (*operators.metadata, ("x-pagoda-tenant", "brown")),
        )  # fmt: skip
        with refused(NOT_FOUND):
            await acting.ask(model="pirate")
        path.write_text(TENANTS.replace("adapters = []", 'adapters = ["secret"]'))

        async def brown_may() -> bool:
            return await brown.listed() == ["secret"]

        await until(brown_may)
        await brown.ask(model="secret")


async def test_all_engines_hold_an_adapter_or_none_and_a_joining_one_gets_it_first(tmp_path: Path) -> None:
    async with fleet(tmp_path, engines=2) as server:
        one, two = server.proxies
        broken = engine_pb2.AdapterError(fault=engine_pb2.ADAPTER_FAULT_INVALID, detail="a rank of 7")
        two.faults[str(server.folder / "one")] = broken
        with refused(INVALID, "a rank of 7", "engine e1"):
            await server.load("a", "one")
        assert (one.held, two.held, await server.loras()) == ({}, {}, {})
        await server.load("a", "two")
        with refused(INVALID, "a rank of 7"):
            await server.load("a", "one", replace=True)
        identity = server.identities["two"]
        await until(lambda: all(each.held["a"].identity == identity for each in (one, two)))
        assert bytes.fromhex((await server.loras())["a"].identity) == identity
        two.faults.clear()

        one.submitted.clear()
        two.may_load.clear()
        server.engines[1].kill()
        server.engines[1].wait()
        await until(lambda: not two.calls)
        with running_engine(f"unix:{tmp_path}/1.sock", *MODEL, "--step-ms", "5"):
            await until(lambda: bool(two.calls))
            before = one.submitted[identity]
            for _ in range(8):
                await server.ask(model="a")
            assert one.submitted[identity] == before + 8
            assert (await server.loras())["a"].engines == ["e0"]
            two.may_load.set()

            async def both_hold_it() -> bool:
                return list((await server.loras())["a"].engines) == ["e0", "e1"]

            await until(both_hold_it)
            before = two.submitted[identity]
            for _ in range(8):
                await server.ask(model="a")
            assert two.submitted[identity] > before


async def test_a_stream_goes_on_only_where_the_same_adapter_is(tmp_path: Path) -> None:
    async with fleet(tmp_path, engines=2) as server:
        await server.load("a", "one")
        identity = server.identities["one"]

        async def stream(change: Callable[[AdapterProxy], None]) -> tuple[list[int], AdapterProxy]:
            """A stream whose engine dies in its midst, and the proxy of the other one, which has changed before."""
            for proxy in server.proxies:
                proxy.submitted.clear()
            received = []
            async for response in server.inference.Generate(_named(200, "a", ""), timeout=60):
                received.append(response)
                if len(received) == 20:
                    at = 0 if server.proxies[0].submitted[identity] else 1
                    change(server.proxies[1 - at])
                    server.engines[at].send_signal(signal.SIGKILL)
            return Answer(received).ids(), server.proxies[1 - at]

        def has_another(proxy: AdapterProxy) -> None:
            proxy.held["a"].identity = server.identities["two"]
            proxy.report()

        ids, other = await stream(lambda proxy: None)
        assert (len(ids), other.submitted[identity]) == (200, 1)
        dead = next(at for at in (0, 1) if server.proxies[at] is not other)
        with running_engine(f"unix:{tmp_path}/{dead}.sock", *MODEL, "--step-ms", "5") as server.engines[dead]:

            async def both_hold_it() -> bool:
                return len((await server.loras())["a"].engines) == 2

            await until(both_hold_it)
            server.proxies[dead].may_load.clear()
            with refused(grpc.StatusCode.UNAVAILABLE):
                await stream(has_another)
            assert sum(proxy.submitted[identity] for proxy in server.proxies) == 1


def _named(tokens: int, adapter: str, request_id: str) -> inference_pb2.GenerateRequest:
    asked = request("once", tokens)
    asked.lora_name, asked.request_id, asked.resumable = adapter, request_id, True
    return asked


async def test_a_stream_whose_adapter_was_replaced_is_not_resumed_with_another(tmp_path: Path) -> None:
    async with fleet(tmp_path) as server:
        await server.load("a", "one")
        call = server.inference.Generate(_named(300, "a", "kept"), timeout=60)
        for _ in range(5):
            await call.read()
        call.cancel()
        resume = inference_pb2.ResumeRequest(request_id="kept", received=[0])
        answer = Answer([response async for response in server.inference.Resume(resume, timeout=60)])
        assert len(answer.ids()) == 300
        adapter(server.folder / "one", "other bytes at the same path")
        await server.load("a", "one", replace=True)
        call = server.inference.Generate(_named(300, "a", "new"), timeout=60)
        for _ in range(5):
            await call.read()
        call.cancel()
        await server.load("a", "two", replace=True)
        with refused(NOT_FOUND, "no longer loaded"):
            async for _ in server.inference.Resume(inference_pb2.ResumeRequest(request_id="new"), timeout=60):
                pass


async def test_an_adapter_survives_its_engine_and_changed_files_do_not_take_its_place(tmp_path: Path) -> None:
    async with fleet(tmp_path) as server:
        (proxy,) = server.proxies
        await server.load("a", "one", pinned=True)
        await server.load("b", "two")
        server.engines[0].kill()
        server.engines[0].wait()
        adapter(server.folder / "two", "changed")
        with running_engine(f"unix:{tmp_path}/0.sock", *MODEL):
            await until(lambda: "a" in proxy.held and proxy.loads[str(server.folder / "two")] == 2)
            assert proxy.held["a"].is_pinned

            async def a_is_back() -> bool:
                return (await server.loras())["a"].ready

            await until(a_is_back)
            await server.ask(model="a")
            lost = (await server.loras())["b"]
            assert not lost.ready
            assert "changed" in lost.fault
            with refused(grpc.StatusCode.UNAVAILABLE):
                await server.ask(model="b")
            await server.load("b", "two", replace=True)
            await server.ask(model="b")


async def test_a_connection_that_breaks_changes_nothing_and_what_was_unloaded_meanwhile_stays_so(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as server:
        (proxy,) = server.proxies
        await server.load("a", "one")
        await server.load("b", "two")
        loads = proxy.loads.total()
        del proxy.held["b"]  # by another router, which this one does not hear of before it is back
        proxy.cut()

        async def has_a_alone() -> bool:
            with contextlib.suppress(grpc.RpcError):
                return [name for name, each in (await server.loras()).items() if each.ready] == ["a"]
            return False

        await until(has_a_alone)
        await until_answers(server, "a")
        assert list(await server.loras()) == ["a"]
        assert proxy.loads.total() == loads
        with refused(NOT_FOUND):
            await server.ask(model="b")


async def until_answers(server: Fleet, adapter: str) -> None:
    async def answers() -> bool:
        with contextlib.suppress(grpc.RpcError):
            return bool(await server.ask(model=adapter))
        return False

    await until(answers)


async def test_adapters_of_the_settings_are_there_from_the_start_and_a_broken_one_ends_it(tmp_path: Path) -> None:
    async with fleet(tmp_path, declares=("one", "two")) as server:
        await server.ask(model="one")
        await server.ask(model="two")
        assert sorted(await server.listed()) == ["one", "two"]
    adapter(tmp_path / "loras" / "one", "")
    with running_engine(f"unix:{tmp_path}/alone.sock", *MODEL):
        async with AdapterProxy(f"unix:{tmp_path}/alone.proxy", f"unix:{tmp_path}/alone.sock").running():
            where = ("--engine", f"unix:{tmp_path}/alone.proxy", "--lora", f"bad={tmp_path}/nothing")
            with running_server(*MODEL, *where, ready=False) as failing:
                assert await asyncio.to_thread(failing.process.wait, 60) == EXIT_CONFIG
                assert "--lora: bad cannot be loaded" in failing.tail()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--lora", "synthetic=x"), "--lora: synthetic is the name of a served model"),
        (
            ("--lora", "sql=x", "--max-adapters", "0"),
            "--lora: sql cannot be loaded: lora_name: needs engines with slots",
        ),
        (("--lora", "sql=/dev/null/x"), "--lora: sql cannot be loaded: lora_path: "),
    ],
)
def test_adapters_of_the_settings_that_cannot_be_served_end_the_start(arguments: tuple[str, ...], why: str) -> None:
    failed = subprocess.run(
        [sys.executable, "-m", "pagoda_server.cli", "serve", *MODEL, "--listen", "127.0.0.1:0", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (failed.returncode, why in failed.stderr) == (EXIT_CONFIG, True), failed.stderr


async def test_an_adapter_that_a_restarted_engine_cannot_load_is_missed_alone(tmp_path: Path) -> None:
    adapter(tmp_path / "one", "one")
    with running_server(*MODEL, "--lora", f"sql={tmp_path}/one") as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            asked = Fleet(tmp_path, server, [], [], channel)
            await asked.ask(model="sql")
            (tmp_path / "one" / "adapter_config.json").write_text("{")
            server.engine().kill()

            async def is_served_again() -> bool:
                with contextlib.suppress(grpc.RpcError):
                    return bool(await asked.ask()) and bool((await asked.loras())["sql"].fault)
                return False

            await until(is_served_again)
            with refused(grpc.StatusCode.UNAVAILABLE, "adapter"):
                await asked.ask(model="sql")
            assert "cannot load the adapter sql" in server.tail()


async def test_a_server_is_ready_once_the_adapters_of_its_settings_are_loaded(tmp_path: Path) -> None:
    adapter(tmp_path / "one", "one")
    seen, address = f"unix:{tmp_path}/0.proxy", f"unix:{tmp_path}/0.sock"
    async with AdapterProxy(seen, address).running() as proxy:
        proxy.may_load.clear()
        where = ("--engine", seen, "--http", "127.0.0.1:0", "--lora", f"sql={tmp_path}/one")
        with contextlib.ExitStack() as stack:
            stack.enter_context(running_engine(address, *MODEL))
            starting = running_server(*MODEL, *where, ready=False)
            started = await asyncio.to_thread(stack.enter_context, starting)
            async with grpc.aio.insecure_channel(started.address) as channel:
                server = Fleet(tmp_path, started, [proxy], [], channel)
                await until(lambda: proxy.loads_waiting)
                assert await asyncio.to_thread(started.health) == health_pb2.HealthCheckResponse.NOT_SERVING
                assert not (await server.loras())["sql"].ready
                assert (await server.http("/v1/models"))[0] == 503
                proxy.may_load.set()
                await asyncio.to_thread(started.wait_ready)
                await server.ask(model="sql")
                assert await server.listed() == ["sql"]


async def test_a_server_without_engines_lists_the_adapters_that_requests_can_wait_for(tmp_path: Path) -> None:
    adapter(tmp_path / "one", "one")
    address = f"unix:{tmp_path}/0.sock"
    where = ("--engine", address, "--engine-wait-s", "60", "--http", "127.0.0.1:0", "--lora", f"sql={tmp_path}/one")
    with contextlib.ExitStack() as stack:
        started = await asyncio.to_thread(stack.enter_context, running_server(*MODEL, *where))
        async with grpc.aio.insecure_channel(started.address) as channel:
            server = Fleet(tmp_path, started, [], [], channel)
            status, models = await server.http("/v1/models")
            assert (status, [each["id"] for each in models["data"]]) == (200, ["synthetic", "sql"])
            assert (await server.http("/v1/models/sql"))[0] == 200
            assert (await server.http("/v1/models/gone"))[0] == 404
            waiting = asyncio.create_task(server.ask(model="sql"))
            await asyncio.sleep(0.2)
            stack.enter_context(running_engine(address, *MODEL))
            assert len((await waiting).ids()) == 3


async def test_what_one_router_loads_and_unloads_the_others_learn_from_the_engines(tmp_path: Path) -> None:
    async with fleet(tmp_path, "--workers", "2", engines=2) as server:

        async def everywhere(*names: str) -> None:
            """Wait until every connection, whatever router it reaches, has these adapters."""

            async def all_have() -> bool:
                for _ in range(12):
                    options = [("grpc.use_local_subchannel_pool", 1)]
                    async with grpc.aio.insecure_channel(server.server.address, options=options) as channel:
                        listed = await control_pb2_grpc.ControlStub(channel).ListModels(
                            control_pb2.ListModelsRequest(), timeout=60
                        )
                        if [each.name for each in listed.models[0].adapters] != [*names]:
                            return False
                        for name in names:
                            asked = request("once", 2)
                            asked.model = name
                            inference = inference_pb2_grpc.InferenceStub(channel)
                            assert [response async for response in inference.Generate(asked, timeout=60)]
                return True

            await until(all_have)

        await server.load("a", "one")
        await everywhere("a")
        await server.load("b", "two")
        await everywhere("a", "b")
        before = {at: proxy.submitted.copy() for at, proxy in enumerate(server.proxies)}
        await server.load("a", "two", replace=True)

        async def a_is_two() -> bool:
            await server.ask(model="a")
            counts = [proxy.submitted[server.identities["one"]] for proxy in server.proxies]
            return counts == [each[server.identities["one"]] for each in before.values()]

        await until(a_is_two)
        await server.unload("a")
        await everywhere("b")


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_command_line_loads_lists_and_removes_adapters_of_a_spawned_engine(
    tmp_path: Path, workers: int
) -> None:
    """And an engine that takes its place in an upgrade holds them, too."""
    adapter(tmp_path / "one", "one")
    declared = ("--lora", f"first={tmp_path}/one", "--lora-dir", str(tmp_path))
    starting = running_server(*MODEL, *declared, "--workers", str(workers), "--max-connection-age-s", "1")
    with contextlib.ExitStack() as stack:
        server = await asyncio.to_thread(stack.enter_context, starting)

        async def asked(*arguments: str) -> tuple[int, str]:
            return await pagoda(*arguments, "--address", server.address)

        code, printed = await asked("lora", "add", "second", "one", "--pin")
        assert (code, printed.split(":")[0]) == (0, "second"), printed
        code, printed = await asked("lora", "list")
        assert code == 0
        assert [line.split()[:2] for line in printed.splitlines()[1:]] == [
            ["first", "synthetic"],
            ["second", "synthetic"],
        ]
        assert "pinned" in printed
        adapter(tmp_path / "other", "other")
        assert (await asked("lora", "add", "second", "one"))[0] == 0, "it is loaded already, and stays pinned"
        code, printed = await asked("lora", "add", "second", "other")
        assert (code, "replace" in printed) == (1, True)
        code, printed = await asked("lora", "add", "third", "..")
        assert (code, "leads out of --lora-dir" in printed) == (1, True)
        for _ in range(2):
            code, printed = await asked("generate", "--raw", "once", "--model", "second", "--max-tokens", "3")
            assert code == 0, printed
            assert "pinned" in (await asked("lora", "list"))[1]
            async with asyncio.timeout(120):  # until what was replaced before has ended
                while (await pagoda("upgrade", str(server.process.pid)))[0]:  # noqa: ASYNC110 - of other processes
                    await asyncio.sleep(0.5)
        assert (await asked("generate", "--raw", "once", "--model", "second", "--max-tokens", "3"))[0] == 0
        assert await asked("lora", "remove", "second") == (0, "removed second\n")
        code, printed = await asked("generate", "--raw", "once", "--model", "second", "--max-tokens", "3")
        assert (code, "model: not served here" in printed) == (1, True)
