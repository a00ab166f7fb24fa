"""What routers know of adapters, whatever is loaded, unloaded, lost and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.engine.v1 import engine_pb2
from pagoda_server.router.engines.adapters import Adapters
from pagoda_server.router.engines.choosing import Asked, LeastLoaded
from pagoda_server.router.engines.fleet import Engines
from pagoda_server.router.engines.held_adapters import Adapter, HeldAdapters
from pagoda_server.router.errors import AlreadyExists, InvalidArgument, NotFound, PagodaError, Unavailable
from pagoda_server.router.request.loras import confined

PATHS = ("one", "two")
NAMES = ("a", "b", "c")
MAX_LOADED = 2
_epochs = itertools.count(1)


class Process:
    """An engine: what it holds, and the routers that are connected."""

    def __init__(self, files: dict[str, int]) -> None:
        self.files = files
        self.epoch = next(_epochs)
        self.held: dict[str, engine_pb2.Adapter] = {}
        self.channels: list[Channel] = []
        self.is_silent = False  # it reports no changes
        self.delays = random.Random(0)
        self.most_delay = self.load_time = 0  # turns of the event loop: of a message on its way, and of a load
        self.turn = asyncio.Lock()  # questions are answered one by one

    def restart(self) -> None:
        for channel in self.channels:
            channel.lose()
        self.epoch, self.held = next(_epochs), {}

    def load(self, name: str, path: str, identity: bytes, *, keeps_other: bool) -> engine_pb2.Adapter:
        found = hashlib.sha256(f"{path} {self.files[path]}".encode()).digest()
        if identity not in (b"", found):
            raise InvalidArgument("lora_path", "the files have changed")
        if keeps_other and name in self.held and self.held[name].identity != found:
            raise AlreadyExists("another adapter has the name")
        if len({*self.held, name}) > MAX_LOADED:
            raise InvalidArgument("lora_path", "it holds as many as it may")
        self.held[name] = engine_pb2.Adapter(name=name, identity=found, path=path)
        return self.held[name]

    def report(self) -> None:
        for channel in () if self.is_silent else self.channels:
            if channel.is_ready:
                asyncio.get_running_loop().call_soon(channel.report, self.epoch)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Channel:
    """A router's end of the channel to an engine."""

    address = block_layout = b""
    is_leaving = is_suspect = False
    num_sequences = 0
    role = "both"
    retry_after_s = None

    def __init__(self, name: str, process: Process, follow: Callable[[Any], None]) -> None:
        self.name = self.label = name
        self.held, self.questions = HeldAdapters(), self
        self._process, self._follow = process, follow
        process.channels.append(self)
        self.connect()

    @property
    def is_ready(self) -> bool:
        return self.held.limits is not None

    takes_requests = is_ready

    def connect(self) -> None:
        hello = engine_pb2.EngineMessage(epoch=self._process.epoch)
        hello.adapter_limits.CopyFrom(engine_pb2.AdapterLimits(max_adapters=1, max_loaded=MAX_LOADED))
        self.held.greet(hello)
        asyncio.get_running_loop().call_soon(self.report, self._process.epoch)

    def report(self, epoch: int) -> None:
        if self.is_ready and epoch == self._process.epoch == self.held.epoch:
            self.held.report(engine_pb2.Adapters(held=self._process.held.values()))
            self._follow(self)

    def lose(self) -> None:
        self.held.lose()

    async def load_adapter(
        self, name: str, path: str, *, is_pinned: bool = False, identity: bytes = b"", keeps_other: bool = False
    ) -> Adapter:
        def load() -> engine_pb2.Adapter:
            return self._process.load(name, path, identity, keeps_other=keeps_other)

        return await self._ask(load, self._process.load_time)

    async def unload_adapter(self, name: str) -> Adapter:
        def unload() -> engine_pb2.Adapter:
            if name not in self._process.held:
                raise NotFound("no such adapter")
            return self._process.held.pop(name)

        return await self._ask(unload, is_gone=True)

    async def _ask(self, change: Callable[[], engine_pb2.Adapter], takes: int = 0, *, is_gone: bool = False) -> Adapter:
        limits, process = self.held.limits, self._process
        await turns(1 + process.delays.randint(0, process.most_delay))
        async with process.turn:
            await turns(takes)
            if self.held.limits is not limits or limits is None:
                raise Unavailable("the engine was lost")
            try:
                adapter = Adapter.of(change())
                self.held.change(adapter, is_gone=is_gone)
            finally:
                process.report()
        await turns(process.delays.randint(0, process.most_delay))
        return adapter


class Known(Engines):
    def __init__(self) -> None:
        super().__init__(LeastLoaded())
        self.all: list[Any] = []

    @property
    def channels(self) -> Sequence[Any]:
        return self.all


class World:
    """Routers, each with a channel to every engine."""

    def __init__(self, num_routers: int, num_engines: int, declared: dict[str, str] | None = None) -> None:
        self.files = dict.fromkeys(PATHS, 0)
        self.processes = [Process(self.files) for _ in range(num_engines)]
        self.routers: list[Adapters] = []
        self.channels: list[list[Channel]] = []
        self.faults: list[str] = []  # adapters of the settings that an engine could not load, and none had
        for _ in range(num_routers):
            engines = Known()
            router = Adapters(engines, declared, self._on_fault)
            channels = [Channel(f"e{at}", each, router.follow) for at, each in enumerate(self.processes)]
            engines.all = channels[:: -1 if self.routers else 1]  # routers need not list engines in the same order
            self.routers.append(router)
            self.channels.append(channels)

    async def _on_fault(self, name: str, error: PagodaError) -> None:
        self.faults.append(name)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Let no router hear of what others have engines do."""
        for process in self.processes:
            process.is_silent = True
        try:
            yield
        finally:
            for process in self.processes:
                process.is_silent = False
                process.report()

    @contextlib.contextmanager
    def slow(self, seed: int) -> Iterator[None]:
        """Let messages take a few turns, which differ, and loads more than any of them."""
        delays = random.Random(seed)
        for process in self.processes:
            process.delays, process.most_delay, process.load_time = delays, 3, 12
        try:
            yield
        finally:
            for process in self.processes:
                process.most_delay = process.load_time = 0

    async def after_a_while(self, change: Coroutine[Any, Any, Any]) -> Any:
        await turns(self.processes[0].delays.randint(0, 40))
        return await change

    async def settle(self) -> None:
        """Wait until nothing more happens."""
        for _ in range(3):
            while tasks := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
                await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def reconnect(self) -> None:
        for channels in self.channels:
            for channel in channels:
                if not channel.is_ready:
                    channel.connect()

    def check(self) -> None:
        """At rest all routers know the same, and each engine holds that, or it is known why not."""
        meanings = [{name: each.identity for name, each in router.known.items()} for router in self.routers]
        assert all(each == meanings[0] for each in meanings)
        for router, channels in zip(self.routers, self.channels, strict=True):
            for name, adapter in router.known.items():
                for channel, process in zip(channels, self.processes, strict=True):
                    held = process.held.get(name)
                    holds = held is not None and held.identity == adapter.identity
                    assert holds or f"engine {channel.name}" in router.fault(name)
                    assert channel.held.holds(adapter.identity) >= holds
        for process in self.processes:
            assert process.held.keys() <= meanings[0].keys(), "nothing is held that no request can name"


ROUTERS, ENGINES = 2, 2
operations = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.integers(0, ROUTERS - 1), st.sampled_from(NAMES), st.sampled_from(PATHS)),
        st.tuples(st.just("load at once"), st.sampled_from(NAMES), st.permutations(PATHS)),
        st.tuples(st.just("load and unload at once"), st.sampled_from(NAMES), st.sampled_from(PATHS), st.integers(0)),
        st.tuples(st.just("replace at once"), st.sampled_from(NAMES), st.permutations(PATHS), st.integers(0)),
        st.tuples(st.just("load, and unload elsewhere"), st.sampled_from(NAMES), st.sampled_from(PATHS)),
        st.tuples(st.just("unload"), st.sampled_from(NAMES)),
        st.tuples(st.just("restart"), st.integers(0, ENGINES - 1)),
        st.tuples(st.just("cut"), st.integers(0, ROUTERS - 1), st.integers(0, ENGINES - 1)),
        st.tuples(st.just("write"), st.sampled_from(PATHS)),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=300)
@given(operations)
def test_routers_agree_and_engines_hold_what_names_mean_whatever_happens_in_turn(steps: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        world = World(ROUTERS, ENGINES)
        await world.settle()
        for kind, *arguments in steps:
            match kind:
                case "load":
                    at, name, path = arguments
                    with contextlib.suppress(PagodaError):
                        await world.routers[at].load(name, path, is_pinned=False, replaces=True)
                case "load at once":
                    name, paths = arguments
                    was_free = all(name not in router for router in world.routers)
                    found = await asyncio.gather(
                        *(
                            router.load(name, path, is_pinned=False, replaces=False)
                            for router, path in zip(world.routers, paths, strict=True)
                        ),
                        return_exceptions=True,
                    )
                    if was_free and any(isinstance(each, Adapter) for each in found):
                        assert [type(each) for each in found].count(AlreadyExists) == 1, found
                case "load and unload at once":
                    name, path, seed = arguments
                    with world.slow(seed):
                        loading = world.routers[0].load(name, path, is_pinned=False, replaces=True)
                        await asyncio.gather(
                            loading, world.after_a_while(world.routers[1].unload(name)), return_exceptions=True
                        )
                case "replace at once":
                    name, paths, seed = arguments
                    with world.slow(seed):
                        loads = (
                            world.after_a_while(router.load(name, path, is_pinned=False, replaces=True))
                            for router, path in zip(world.routers, paths, strict=True)
                        )
                        await asyncio.gather(*loads, return_exceptions=True)
                case "load, and unload elsewhere":
                    name, path = arguments
                    with contextlib.suppress(PagodaError), world.silent():
                        await world.routers[0].load(name, path, is_pinned=False, replaces=True)
                        await world.routers[1].unload(name)
                        assert all(name not in process.held for process in world.processes)
                case "unload":
                    for router in world.routers:  # as SharedAdmin does
                        with contextlib.suppress(NotFound):
                            await router.unload(arguments[0])
                case "restart":
                    world.processes[arguments[0]].restart()
                case "cut":
                    world.channels[arguments[0]][arguments[1]].lose()
                case "write":
                    world.files[arguments[0]] += 1
            world.reconnect()
            await world.settle()
            world.check()

    asyncio.run(run())


async def test_a_router_unloads_what_another_one_has_loaded_just_now() -> None:
    world = World(2, 2)
    await world.settle()
    first, second = world.routers
    with world.silent():
        await first.load("a", "one", is_pinned=False, replaces=False)
        assert "a" not in second
        await second.unload("a")
        assert [process.held for process in world.processes] == [{}, {}]
        with pytest.raises(NotFound):
            await second.unload("a")
    await world.settle()
    world.check()
    assert "a" not in first


async def test_an_unload_that_an_engine_dies_of_is_found_only_if_the_adapter_was_known() -> None:
    world = World(1, 1)
    await world.settle()
    await world.routers[0].load("a", "one", is_pinned=False, replaces=False)
    for name in ("a", "b"):
        unloading = asyncio.create_task(world.routers[0].unload(name))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        world.processes[0].restart()
        if name == "a":
            await unloading
        else:
            with pytest.raises(Unavailable, match="lost"):
                await unloading
        world.reconnect()
        await world.settle()
        world.check()
    assert world.routers[0].names == []


async def test_the_adapters_of_the_settings_are_loaded_once_an_engine_has_each_or_none_can() -> None:
    world = World(1, 2, {"a": "one", "b": "two", "c": "one"})
    (router,) = world.routers
    assert not router.are_loaded
    await world.settle()
    assert router.are_loaded
    assert set(world.faults) == {"c"}, "engines hold two"
    assert "as many as it may" in router.fault("c")
    assert sorted(router.known) == ["a", "b"]
    world.processes[0].restart()
    assert router.are_loaded, "it is about the start"


async def test_a_load_that_an_engine_dies_of_is_kept_by_the_others_and_reaches_it_when_it_is_back() -> None:
    world = World(1, 2)
    await world.settle()
    loading = asyncio.create_task(world.routers[0].load("a", "one", is_pinned=False, replaces=False))
    await asyncio.sleep(0)
    world.processes[1].restart()
    adapter = await loading
    assert world.routers[0].holders("a") == [world.channels[0][0]]
    world.reconnect()
    await world.settle()
    assert len(world.routers[0].holders("a")) == 2
    engines = world.routers[0]._engines.holding(adapter.identity)
    assert engines.pick(asked=Asked([1])) in world.channels[0]
    with pytest.raises(Unavailable, match="adapter"):
        world.routers[0]._engines.holding(bytes(32)).pick()


async def test_a_client_that_gives_up_does_not_leave_a_load_half_done() -> None:
    world = World(1, 2)
    await world.settle()
    loading = asyncio.create_task(world.routers[0].load("a", "one", is_pinned=False, replaces=False))
    await asyncio.sleep(0)
    loading.cancel()
    await world.settle()
    assert len(world.routers[0].holders("a")) == 2


@pytest.mark.parametrize("given", ["..", "../x", "/etc/passwd", "a/../../x", "link", "link/x", "files", "./link"])
def test_a_path_never_leads_out_of_the_folder(given: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "secret").write_text("")
    folder = tmp_path / "loras"
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "adapter_config.json").symlink_to(tmp_path / "secret")
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(InvalidArgument, match="leads out"):
        confined(folder, given)


def test_a_link_to_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    (tmp_path / "alias").symlink_to(os.fsdecode(b"\xff"))
    with pytest.raises(InvalidArgument, match="not printable"):
        confined(tmp_path, "alias")


def test_a_folder_may_be_a_link_itself_and_paths_in_it_lose_their_links(tmp_path: Path) -> None:
    (tmp_path / "real" / "a").mkdir(parents=True)
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "alias").symlink_to(tmp_path / "real" / "a")
    for path in ("a", "./a", "b/../a", "alias", str(tmp_path / "folder" / "a")):
        assert confined(tmp_path / "folder", path) == str(tmp_path / "real" / "a")
