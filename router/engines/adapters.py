"""The LoRA adapters of a model: which names requests may use, and that every engine holds what they mean.

Engines report what they hold, to every router. So what one router loads, the others learn from the engines; and what
an engine has lost with its process, each router has it load again, from the same path and with the same identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import (
    AlreadyExists,
    NotFound,
    PagodaError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from .channel import EngineChannel
from .fleet import Engines
from .held_adapters import Adapter

log = logging.getLogger("pagoda.router")

NO_SLOTS = "needs engines with slots for adapters (--max-adapters)"
MAX_WAITING = 16  # loads and unloads that wait for others
MAX_PASSES = 4  # of an unload over the engines, while others load the same adapter


class Adapters:
    """The adapters of one model, by name.

    known  those that requests may name
    """

    def __init__(
        self,
        engines: Engines,
        declared: Mapping[str, str] | None = None,
        on_fault: Callable[[str, PagodaError], Awaitable[None]] | None = None,
        inherited: Iterable[Adapter] = (),
    ) -> None:
        """
        declared   paths, by name, of those that engines load when they join
        on_fault   called when an engine cannot load one of these, and none has
        inherited  what a former engine held, in whose place one without adapters comes
        """
        self.known: dict[str, Adapter] = {each.name: each for each in inherited}
        self._faults: dict[tuple[str, str], str] = {}  # by adapter and engine, why it does not hold what it should
        self._engines = engines
        self._declared = dict(declared or {})
        self._on_fault = on_fault
        # By engine, what it reported last, with its epoch: a connection that is made anew does not change what is held.
        self._reported: WeakKeyDictionary[EngineChannel, tuple[int, Mapping[str, Adapter]]] = WeakKeyDictionary()
        self._greeted: WeakKeyDictionary[EngineChannel, int] = WeakKeyDictionary()  # connections that were followed
        self._changing = asyncio.Lock()
        self._num_waiting = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- for requests -----------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self.known or name in self._declared

    @property
    def names(self) -> list[str]:
        return sorted({*self.known, *self._declared})

    def identity_of(self, name: str) -> bytes:
        """What a name means now. Raises NotFound, Unavailable for one that is still to be loaded."""
        if (adapter := self.known.get(name)) is not None:
            return adapter.identity
        if name in self._declared:
            raise Unavailable("the adapter is not loaded yet", retry_after_s=self._engines.retry_after_s)
        raise NotFound("lora_name: the adapter has been unloaded")

    def check_kept(self, identity: bytes) -> None:
        """Raise NotFound if a stream that has begun with this adapter can never go on."""
        if identity and not any(each.identity == identity for each in self.known.values()):
            raise NotFound("lora_name: the adapter that the stream has begun with is no longer loaded")

    def holders(self, name: str) -> list[EngineChannel]:
        """The engines that take requests with what the name means."""
        adapter = self.known.get(name)
        return self._engines.holding(adapter.identity).ready if adapter else []

    @property
    def are_loaded(self) -> bool:
        """Whether those of --lora have been loaded. One that no engine can load keeps nothing waiting."""
        return all(
            name in self.known or all((name, engine.name) in self._faults for engine in self._engines.ready)
            for name in self._declared
        )

    @property
    def are_held(self) -> bool:
        """Whether an engine holds each of them, or cannot."""
        return all(self.holders(name) or self.fault(name) for name in self.names)

    def fault(self, name: str) -> str:
        """Why engines could not load an adapter, for people to read; empty: all could."""
        return "; ".join(f"engine {engine}: {why}" for (of, engine), why in self._faults.items() if of == name)

    # -- what engines report ----------------------------------------------------------------------------------------

    def follow(self, engine: EngineChannel) -> None:
        """Take over what an engine that is ready reports. Have it load what it lacks if it has greeted anew."""
        held = engine.held
        if not engine.is_ready or (held.by_name is None and held.limits is not None):
            return
        if held.by_name is not None:
            self._take_over(engine, held.by_name)
        if self._greeted.get(engine) != held.greetings:
            self._greeted[engine] = held.greetings
            self._begin(self._restore(engine))

    def _take_over(self, engine: EngineChannel, by_name: Mapping[str, Adapter]) -> None:
        """Take over what has changed since the engine's last report."""
        epoch, before = self._reported.get(engine, (None, {}))
        self._reported[engine] = engine.held.epoch, by_name
        has_joined = epoch != engine.held.epoch
        for name, adapter in by_name.items():
            if has_joined and self.holders(name):
                continue  # what the others hold counts: it has missed a change
            if has_joined or name not in before or before[name].identity != adapter.identity:
                self.known[name] = adapter
                if has_joined and self._declared.get(name, adapter.path) != adapter.path:
                    self._note_other(engine, adapter)
        for name in () if has_joined else before.keys() - by_name.keys():
            if name in self.known and self.known[name].identity == before[name].identity:
                self._drop(name)

    def _drop(self, name: str) -> None:
        """Forget what a name means: an engine has been asked to. Another one may still hold what it meant before."""
        gone = self.known[name]
        self._forget(name)
        for engine in self._engines.ready:
            other = (engine.held.by_name or {}).get(name)
            if other is not None and other.identity != gone.identity:
                self.known[name] = other

    def _forget(self, name: str) -> None:
        self.known.pop(name, None)
        self._declared.pop(name, None)
        self._faults = {key: why for key, why in self._faults.items() if key[0] != name}

    async def _restore(self, engine: EngineChannel) -> None:
        """Have an engine that has greeted hold what the others hold, and forget what was unloaded without it."""
        async with self._changing:
            for name in list(engine.held.by_name or {}):
                if name not in self.known:
                    with contextlib.suppress(PagodaError):
                        await self._unload_from(engine, name)
            for name in self.names:
                try:
                    await self._bring(engine, name)
                except Unavailable:
                    return  # it is lost again
                except PagodaError as error:
                    await self._note_fault(engine, name, error)

    async def _bring(self, engine: EngineChannel, name: str) -> None:
        """Have an engine hold what a name means. Raises PagodaError."""
        known, held = self.known.get(name), (engine.held.by_name or {}).get(name)
        if known is not None and (held is None or held.identity != known.identity):
            await self._load_on(engine, name, known.path, known.is_pinned, known.identity)
        elif known is None and (path := self._declared.get(name)) is not None:
            self.known[name] = await self._load_on(engine, name, path)

    async def _note_fault(self, engine: EngineChannel, name: str, error: PagodaError) -> None:
        self._faults[name, engine.name] = error.message
        log.error("the engine at %s cannot load the adapter %s: %s", engine.label, name, error.message)
        if name not in self.known and self._on_fault is not None:
            await self._on_fault(name, error)

    def _note_other(self, engine: EngineChannel, adapter: Adapter) -> None:
        why = f"--lora says {self._declared[adapter.name]}; what it has from {adapter.path} stays until it is replaced"
        self._faults[adapter.name, engine.name] = why
        log.warning("the engine at %s holds another adapter %s: %s", engine.label, adapter.name, why)

    # -- what an operator asks for ----------------------------------------------------------------------------------

    async def load(self, name: str, path: str, *, is_pinned: bool, replaces: bool) -> Adapter:
        """Have every engine hold an adapter under this name, or none.

        Raises AlreadyExists if another one has the name, unless it `replaces` that; Unavailable, Unimplemented,
        ResourceExhausted, and the error of an engine that cannot load it. A caller that gives up does not undo what has
        begun.
        """

        async def change() -> Adapter:
            async with self._turn():
                if name in self._declared and name not in self.known and not replaces:
                    raise AlreadyExists("lora_name: --lora has an adapter of this name; replace takes its place")
                return await self._load_on_all(name, path, is_pinned, replaces)

        return await asyncio.shield(self._begin(change()))

    async def unload(self, name: str) -> None:
        """Have every engine forget an adapter. Raises NotFound, ResourceExhausted, Unavailable.

        All engines are asked, whatever is known here: another router may have had them load it just now.
        """

        async def change() -> None:
            async with self._turn():
                if not self._engines.ready:  # other routers, which learn of it from an engine, would load it again
                    raise Unavailable("no engine is ready", retry_after_s=self._engines.retry_after_s)
                is_known = name in self
                self._forget(name)
                for _ in range(MAX_PASSES):  # until none holds it: a load by another router may have come between
                    was_held, lost = await self._unload_from_all(name)
                    is_known = is_known or was_held
                    if not was_held:
                        break
                if not is_known:
                    raise lost or NotFound("lora_name: no adapter of this name is loaded")

        await asyncio.shield(self._begin(change()))

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One change after another, so that all engines see them in one order. Raises ResourceExhausted."""
        if self._num_waiting >= MAX_WAITING:
            why = f"{MAX_WAITING} loads and unloads of adapters wait"
            raise ResourceExhausted(why, retry_after_s=1.0)
        self._num_waiting += 1
        try:
            async with self._changing:
                yield
        finally:
            self._num_waiting -= 1

    async def _unload_from_all(self, name: str) -> tuple[bool, Unavailable | None]:
        """Whether an engine has held an adapter, and why one cannot be asked."""
        was_held, lost = False, None
        able = [each for each in self._engines.ready if each.held.limits is not None]
        for engine in sorted(able, key=lambda each: _rank(each, name)):  # the order of loads, to overtake none
            try:
                await self._unload_from(engine, name)
                was_held = True
            except Unavailable as error:  # when it is back, it forgets what was known here
                lost = error
            except NotFound:
                pass
        return was_held, lost

    async def _load_on_all(self, name: str, path: str, is_pinned: bool, replaces: bool) -> Adapter:
        former = self.known.get(name)
        adapter: Adapter | None = None
        loaded: list[EngineChannel] = []
        for engine in sorted(self._able(), key=lambda each: _rank(each, name)):
            try:
                identity = adapter.identity if adapter is not None else b""
                adapter = await self._load_on(engine, name, path, is_pinned, identity, keeps_other=not replaces)
                loaded.append(engine)
            except Unavailable:
                continue  # it is lost, and gets what the others hold when it is back
            except PagodaError as error:
                for each in loaded:
                    await self._undo(each, name, former)
                if len(self._engines.ready) > 1:
                    error.message = f"{error.message} (engine {engine.name})"
                raise
        if adapter is None:
            raise Unavailable("the engines were lost", retry_after_s=self._engines.retry_after_s)
        await self._follow_first(name, adapter, loaded)
        return adapter

    async def _follow_first(self, name: str, adapter: Adapter, loaded: Sequence[EngineChannel]) -> None:
        """Have all engines hold what the first holds now.

        Another router may have unloaded or replaced the adapter there after it was loaded, and on the others before.
        """
        first, *others = loaded
        now = adapter if first.held.by_name is None else first.held.by_name.get(name)
        if now is None or now.identity != adapter.identity:
            for engine in others:
                await self._undo(engine, name, now)
        if now is None:
            self._forget(name)
        else:
            self.known[name] = now

    async def _undo(self, engine: EngineChannel, name: str, former: Adapter | None) -> None:
        """Have an engine hold what a name meant before, or nothing under it if that has gone."""
        try:
            if former is not None:
                await self._load_on(engine, name, former.path, former.is_pinned, former.identity)
                return
        except PagodaError as error:
            log.warning("the engine at %s cannot load the former adapter %s: %s", engine.label, name, error.message)
        with contextlib.suppress(PagodaError):
            await self._unload_from(engine, name)

    def _able(self) -> list[EngineChannel]:
        """The engines that can load adapters. Raises Unavailable, Unimplemented."""
        if (why := self._engines.refusal()) is not None:
            raise why
        if not (able := [engine for engine in self._engines.ready if engine.held.limits is not None]):
            raise Unimplemented("lora_name", NO_SLOTS)
        if not (known := [engine for engine in able if engine.held.by_name is not None]):
            raise Unavailable("the engines have not reported yet", retry_after_s=self._engines.retry_after_s)
        return known  # another one gets what these hold once it has

    async def _load_on(
        self,
        engine: EngineChannel,
        name: str,
        path: str,
        is_pinned: bool = False,
        identity: bytes = b"",
        *,
        keeps_other: bool = False,
    ) -> Adapter:
        if engine.held.limits is None:
            raise Unimplemented("lora_name", NO_SLOTS)
        adapter = await engine.questions.load_adapter(
            name, path, is_pinned=is_pinned, identity=identity, keeps_other=keeps_other
        )
        self._faults.pop((name, engine.name), None)
        self.follow(engine)
        return adapter

    async def _unload_from(self, engine: EngineChannel, name: str) -> None:
        await engine.questions.unload_adapter(name)
        self.follow(engine)

    def _begin(self, change: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(change)
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, PagodaError):
            log.error("a change of adapters failed", exc_info=error)


def _rank(engine: EngineChannel, name: str) -> tuple[bool, int]:
    """The place of an engine among those that load an adapter.

    An engine that holds the name comes first: it refuses another adapter before others have loaded that. The rest have
    one order on all routers, so that of two routers that load a name at once, one gets it on every engine.
    """
    return name not in (engine.held.by_name or {}), engine.held.epoch
