"""Routers load, list and unload adapters, and submit sequences that are computed with them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda_server.channel.strides import chain_root
from pagoda_server.checkpoints import CheckpointError
from pagoda_server.engine.core.adapter import Adapter
from pagoda_server.engine.loop.loop import Add, Inbox
from pagoda_server.engine.runners.synthetic import SyntheticAdapters
from pagoda_server.engine.serving import adapters as held_adapters
from pagoda_server.engine.serving.server import EngineServer
from tests.engine.lora import random_pairs, write_adapter
from tests.engine.test_sessions import INFO, HeldLink

PAIRS = {"q_proj": (3, 4)}


class Session:
    """A router's end of a link to a server of its own or another session's."""

    def __init__(self, server: EngineServer) -> None:
        self.server, self.link, self._numbers = server, HeldLink(), iter(range(1, 100))
        self.link.takes.set()
        self._task = asyncio.create_task(server.serve(self.link))
        self._seen = 0

    def send(self, **message: object) -> None:
        self.link.incoming.put_nowait(engine_pb2.RouterMessage(**message))  # type: ignore[arg-type]

    async def message(self, kind: str) -> engine_pb2.EngineMessage:
        """The next message of a kind."""
        async with asyncio.timeout(20):
            while True:
                for message in self.link.got[self._seen :]:
                    self._seen += 1
                    if message.WhichOneof("message") == kind:
                        return message
                await asyncio.sleep(0.005)

    async def load(self, name: str, path: Path, **fields: object) -> engine_pb2.AdapterAnswer:
        number = next(self._numbers)
        load = engine_pb2.LoadAdapter(number=number, name=name, path=str(path), **fields)  # type: ignore[arg-type]
        self.send(load_adapter=load)
        answer = (await self.message("adapter_answer")).adapter_answer
        assert answer.number == number
        return answer

    async def unload(self, name: str) -> engine_pb2.AdapterAnswer:
        self.send(unload_adapter=engine_pb2.UnloadAdapter(number=99, name=name))
        return (await self.message("adapter_answer")).adapter_answer

    async def held(self) -> dict[str, bytes]:
        return {each.name: each.identity for each in (await self.message("adapters")).adapters.held}

    def submit(self, first: int, adapter: bytes, salt: str = "") -> None:
        sampling, cache = inference_pb2.Sampling(n=1, seed=3), inference_pb2.Cache(salt=salt)
        fields = {"sampling": sampling, "cache": cache, "prompt": [1], "max_tokens": 4, "adapter": adapter}
        self.send(submit=engine_pb2.Submit(first_sequence=first, **fields))  # type: ignore[arg-type]

    async def close(self) -> Exception | None:
        self.link.close()
        return await self._task


def new_server(
    slots: int = 2, most: int = 3, load: Callable[[Path], Adapter] | None = None
) -> tuple[EngineServer, Inbox]:
    loader = SyntheticAdapters(slots, max_rank=8)
    if load is not None:
        loader.load = load  # type: ignore[method-assign]
    server, inbox = EngineServer(INFO, adapters=(loader, most)), Inbox()
    server.attach(inbox)
    return server, inbox


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[int], Path]:
    return lambda seed: write_adapter(tmp_path / str(seed), random_pairs(PAIRS, seed=seed))


def fault_of(answer: engine_pb2.AdapterAnswer) -> int:
    assert answer.WhichOneof("result") == "error"
    return answer.error.fault


async def test_an_adapter_is_loaded_listed_used_and_unloaded(folder: Callable[[int], Path]) -> None:
    server, inbox = new_server()
    session, other = Session(server), Session(server)
    hello = await session.message("hello")
    assert (hello.adapter_limits.max_adapters, hello.adapter_limits.max_loaded) == (2, 3)
    other.send(follow_adapters=engine_pb2.FollowAdapters())
    assert await other.held() == {}
    answer = await session.load("pirate", folder(1))
    identity = answer.adapter.identity
    assert (answer.adapter.name, answer.adapter.rank, len(identity)) == ("pirate", 4, 32)
    assert await other.held() == {"pirate": identity}
    session.submit(20, identity)
    session.submit(21, identity, salt="s")
    session.submit(22, b"")
    assert (await session.unload("pirate")).adapter.identity == identity
    assert await other.held() == {}
    session.submit(23, identity)  # it is gone for new sequences alone
    ended = (await session.message("step")).step.ended
    assert [(each.sequence, each.field) for each in ended] == [(23, "adapter")]
    added = [each.seq for each in inbox.take() if isinstance(each, Add)]
    adapted, salted, base = [seq for seq in added if seq.tokens == [1]][-3:]
    assert adapted.request.adapter is salted.request.adapter
    assert adapted.request.adapter is not None
    assert base.request.adapter is None
    roots = [seq.request.cache_root for seq in (adapted, salted, base)]
    assert roots == [chain_root("", identity), chain_root("s", identity), chain_root("")]
    assert len(set(roots)) == 3
    await session.close()
    await other.close()


async def test_a_name_that_is_loaded_again_means_the_new_bytes(folder: Callable[[int], Path]) -> None:
    server, _ = new_server(most=1)
    session = Session(server)
    first, second = [(await session.load("a", folder(seed))).adapter.identity for seed in (1, 2)]
    assert first != second
    assert fault_of(await session.load("a", folder(1) / "missing")) == engine_pb2.ADAPTER_FAULT_NOT_FOUND
    session.send(follow_adapters=engine_pb2.FollowAdapters())
    assert await session.held() == {"a": second}  # what cannot be loaded replaces nothing
    await session.close()


async def test_of_two_routers_that_load_a_free_name_the_first_gets_it(folder: Callable[[int], Path]) -> None:
    server, _ = new_server()
    first, second = Session(server), Session(server)
    paths = folder(1), folder(2)
    held, taken = await asyncio.gather(
        *(each.load("a", path, keeps_other=True) for each, path in zip((first, second), paths, strict=True))
    )
    assert fault_of(taken) == engine_pb2.ADAPTER_FAULT_TAKEN
    assert held.adapter.identity.hex() in taken.error.detail
    same = await second.load("a", folder(1), keeps_other=True, is_pinned=True)
    assert (same.adapter.identity, same.adapter.is_pinned) == (held.adapter.identity, True)
    assert (await first.load("a", folder(1), keeps_other=True)).adapter.is_pinned, "it stays so"
    first.send(follow_adapters=engine_pb2.FollowAdapters())
    assert await first.held() == {"a": held.adapter.identity}
    for each in (first, second):
        await each.close()


async def test_what_cannot_be_loaded_is_answered_with_its_fault(folder: Callable[[int], Path]) -> None:
    server, _ = new_server(slots=2, most=2)
    session = Session(server)
    path = folder(1)
    found = await session.load("a", path, identity=bytes(32))
    assert fault_of(found) == engine_pb2.ADAPTER_FAULT_CHANGED
    (path / "adapter_config.json").write_text("{}")
    assert fault_of(await session.load("a", path)) == engine_pb2.ADAPTER_FAULT_INVALID
    too_high = {"peft_type": "LORA", "r": 9, "rank_pattern": {"q_proj": 4}}
    (path / "adapter_config.json").write_text(json.dumps(too_high))
    assert "r is 9; --max-lora-rank allows 1 to 8" in (await session.load("a", path)).error.detail
    assert fault_of(await session.load("a", path / "b")) == engine_pb2.ADAPTER_FAULT_NOT_FOUND
    assert fault_of(await session.unload("a")) == engine_pb2.ADAPTER_FAULT_NOT_FOUND
    assert (await session.load("pinned", folder(2), is_pinned=True)).adapter.is_pinned
    second = await session.load("b", folder(3), is_pinned=True)
    assert fault_of(second) == engine_pb2.ADAPTER_FAULT_FULL
    assert "--max-adapters" in second.error.detail
    assert (await session.load("b", folder(3))).HasField("adapter")
    third = await session.load("c", folder(4))
    assert fault_of(third) == engine_pb2.ADAPTER_FAULT_FULL
    assert "--max-loaded-adapters" in third.error.detail
    await session.close()


async def test_two_names_of_the_same_bytes_share_them(folder: Callable[[int], Path]) -> None:
    server, _ = new_server()
    session = Session(server)
    identities = {(await session.load(name, folder(1))).adapter.identity for name in "ab"}
    assert len(identities) == 1
    await session.unload("a")
    session.submit(20, identities.pop())
    session.submit(21, bytes(32))
    ended = (await session.message("step")).step.ended
    assert [each.sequence for each in ended] == [21]
    await session.close()


async def test_loads_wait_for_each_other_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(path: Path) -> Adapter:
        begun.set()
        assert goes_on.wait(30)
        raise CheckpointError("it is slow")

    monkeypatch.setattr(held_adapters, "MAX_WAITING", 3)
    server, inbox = new_server(load=slow)
    session = Session(server)
    for number in range(5):
        load = engine_pb2.LoadAdapter(number=number, name="a", path="b")
        session.send(load_adapter=load)
        if not number:
            await asyncio.to_thread(begun.wait, 30)
    first = (await session.message("adapter_answer")).adapter_answer
    assert (first.number, fault_of(first)) == (4, engine_pb2.ADAPTER_FAULT_FULL)
    session.submit(20, b"")  # others do not wait for the thread that loads
    while not any(  # noqa: ASYNC110 - the inbox is a thread's queue
        isinstance(each, Add) and each.seq.params.max_tokens == 4 for each in inbox.take()
    ):
        await asyncio.sleep(0.005)
    goes_on.set()
    rest = [(await session.message("adapter_answer")).adapter_answer for _ in range(4)]
    assert [each.number for each in rest] == [0, 1, 2, 3]
    await session.close()


async def test_a_loader_that_fails_is_a_fault_of_its_own() -> None:
    def broken(path: Path) -> Adapter:
        raise MemoryError

    server, _ = new_server(load=broken)
    session = Session(server)
    assert fault_of(await session.load("a", Path("b"))) == engine_pb2.ADAPTER_FAULT_FAILED
    await session.close()


@pytest.mark.parametrize(
    "message",
    [
        {"load_adapter": engine_pb2.LoadAdapter(name="", path="a")},
        {"load_adapter": engine_pb2.LoadAdapter(name="a" * 129, path="a")},
        {"load_adapter": engine_pb2.LoadAdapter(name="a\nb", path="a")},
        {"load_adapter": engine_pb2.LoadAdapter(name="a", path="")},
        {"load_adapter": engine_pb2.LoadAdapter(name="a", path="a" * 5000)},
        {"load_adapter": engine_pb2.LoadAdapter(name="a", path="a", identity=b"short")},
        {"unload_adapter": engine_pb2.UnloadAdapter(name="\0")},
        {"submit": engine_pb2.Submit(prompt=[1], max_tokens=1, adapter=b"short")},
    ],
)
async def test_a_router_that_sends_what_no_router_sends_is_dropped(message: dict[str, object]) -> None:
    server, _ = new_server()
    session = Session(server)
    session.send(**message)
    async with asyncio.timeout(20):
        assert isinstance(await session._task, ConnectionError)


async def test_an_engine_without_adapters_announces_no_limits_and_takes_none() -> None:
    server = EngineServer(INFO)
    server.attach(Inbox())
    session = Session(server)
    assert not (await session.message("hello")).HasField("adapter_limits")
    session.send(load_adapter=engine_pb2.LoadAdapter(name="a", path="b"))
    async with asyncio.timeout(20):
        assert isinstance(await session._task, ConnectionError)
