"""The LoRA adapters that the engine holds, by name: they are loaded one after the other, beside the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from pagoda.engine.v1 import engine_pb2

from ...checkpoints import CheckpointError
from ...checkpoints.folder import quoted
from ..core.adapter import Adapter, AdapterLoader

log = logging.getLogger("pagoda.engine")

MAX_WAITING = 64  # loads and unloads of all routers

Question: TypeAlias = engine_pb2.LoadAdapter | engine_pb2.UnloadAdapter
Reply: TypeAlias = Callable[[engine_pb2.AdapterAnswer], None]


class _Refused(Exception):
    def __init__(self, fault: engine_pb2.AdapterFault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


class HeldAdapters:
    """What routers have loaded. The event loop's thread owns it.

    loader      makes adapters for the model, on a thread of its own
    max_loaded  names that are held
    on_change   is called after each change, when it has been answered
    """

    def __init__(self, loader: AdapterLoader, max_loaded: int, on_change: Callable[[], None]) -> None:
        self._loader, self._max_loaded, self._on_change = loader, max_loaded, on_change
        self._held: dict[str, tuple[Adapter, str]] = {}  # by name, with the path
        self._by_identity: dict[bytes, Adapter] = {}
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._questions: asyncio.Queue[tuple[Question, Reply]] = asyncio.Queue(MAX_WAITING)
        self._work: asyncio.Task[None] | None = None

    @property
    def limits(self) -> engine_pb2.AdapterLimits:
        return engine_pb2.AdapterLimits(
            max_adapters=self._loader.num_slots, max_loaded=self._max_loaded, max_rank=self._loader.max_rank
        )

    def get(self, identity: bytes) -> Adapter | None:
        """An adapter that new sequences may have."""
        return self._by_identity.get(identity)

    def all(self) -> engine_pb2.Adapters:
        return engine_pb2.Adapters(held=[_message(name, *held) for name, held in self._held.items()])

    def ask(self, question: Question, reply: Reply) -> None:
        """Load or unload an adapter once all earlier questions are answered; call `reply` with the answer."""
        try:
            self._questions.put_nowait((question, reply))
        except asyncio.QueueFull:
            full = f"{MAX_WAITING} requests to load adapters wait already"
            reply(_answer(question, error=(engine_pb2.ADAPTER_FAULT_FULL, full)))
            return
        if self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._answer_all())

    async def _answer_all(self) -> None:
        while True:
            question, reply = await self._questions.get()
            try:
                if isinstance(question, engine_pb2.UnloadAdapter):
                    answer = _answer(question, adapter=self._unload(question.name))
                else:
                    answer = _answer(question, adapter=await self._load(question))
            except _Refused as refused:
                log.info("adapter %s: %s", quoted(question.name), refused)
                reply(_answer(question, error=(refused.fault, str(refused))))
                continue
            reply(answer)
            self._on_change()

    async def _load(self, load: engine_pb2.LoadAdapter) -> engine_pb2.Adapter:
        self._check_room(load)
        events = asyncio.get_running_loop()
        try:
            adapter = await events.run_in_executor(self._thread, self._loader.load, Path(load.path))
        except FileNotFoundError as error:
            raise _Refused(engine_pb2.ADAPTER_FAULT_NOT_FOUND, str(error)) from None
        except CheckpointError as error:
            raise _Refused(engine_pb2.ADAPTER_FAULT_INVALID, str(error)) from None
        except Exception as error:
            log.exception("adapter %s could not be loaded", quoted(load.name))
            detail = f"{type(error).__name__} while it was read"
            raise _Refused(engine_pb2.ADAPTER_FAULT_FAILED, detail) from None
        if load.identity not in (b"", adapter.identity):
            detail = f"the files have the identity {adapter.identity.hex()}, not {load.identity.hex()}"
            raise _Refused(engine_pb2.ADAPTER_FAULT_CHANGED, detail)
        is_pinned = load.is_pinned
        if load.keeps_other and load.name in self._held:
            held, _ = self._held[load.name]
            is_pinned = is_pinned or held.is_pinned
            if held.identity != adapter.identity:
                detail = (
                    f"{quoted(load.name)} is loaded with the identity {held.identity.hex()}, and the files have"
                    f" {adapter.identity.hex()}; replace takes its place"
                )
                raise _Refused(engine_pb2.ADAPTER_FAULT_TAKEN, detail)
        known = self._by_identity.get(adapter.identity)
        weights = adapter.weights if known is None else known.weights  # equal bytes are held once
        if load.name in self._held:
            self._forget(load.name)
        self._held[load.name] = replace(adapter, weights=weights, is_pinned=is_pinned), load.path
        self._index()
        log.info("adapter %s is loaded from %s", quoted(load.name), quoted(load.path))
        return _message(load.name, *self._held[load.name])

    def _check_room(self, load: engine_pb2.LoadAdapter) -> None:
        others = [adapter for name, (adapter, _) in self._held.items() if name != load.name]
        if len(others) >= self._max_loaded:
            detail = f"{len(others)} adapters are loaded, as many as --max-loaded-adapters allows"
            raise _Refused(engine_pb2.ADAPTER_FAULT_FULL, detail)
        if load.is_pinned and sum(each.is_pinned for each in others) + 1 >= self._loader.num_slots:
            detail = f"of --max-adapters {self._loader.num_slots}, one must be left for adapters that are not pinned"
            raise _Refused(engine_pb2.ADAPTER_FAULT_FULL, detail)

    def _unload(self, name: str) -> engine_pb2.Adapter:
        if name not in self._held:
            raise _Refused(engine_pb2.ADAPTER_FAULT_NOT_FOUND, f"no adapter is called {quoted(name)}")
        found = _message(name, *self._held[name])
        self._forget(name)
        self._index()
        log.info("adapter %s is unloaded", quoted(name))
        return found

    def _forget(self, name: str) -> None:
        adapter, _ = self._held.pop(name)
        adapter.is_pinned = False  # its slot goes to others once its sequences have ended

    def _index(self) -> None:
        self._by_identity = {adapter.identity: adapter for adapter, _ in self._held.values()}


def _message(name: str, adapter: Adapter, path: str) -> engine_pb2.Adapter:
    return engine_pb2.Adapter(
        name=name,
        identity=adapter.identity,
        rank=adapter.rank,
        num_bytes=adapter.num_bytes,
        is_pinned=adapter.is_pinned,
        path=path,
    )


def _answer(
    question: Question,
    adapter: engine_pb2.Adapter | None = None,
    error: tuple[engine_pb2.AdapterFault, str] | None = None,
) -> engine_pb2.AdapterAnswer:
    if error is None:
        return engine_pb2.AdapterAnswer(number=question.number, adapter=adapter)
    fault, detail = error
    return engine_pb2.AdapterAnswer(number=question.number, error=engine_pb2.AdapterError(fault=fault, detail=detail))
