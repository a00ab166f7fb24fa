"""The routers that are started together, and the engine that they use: what a server replaces as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...settings import ServeConfig
from .parent import OwnParent
from .succession import Handover, folder_of
from .supervisor import SpawnedEngine, engine_supervisor, spawned_engine

if TYPE_CHECKING:
    from .router import Router


class Child(Protocol):
    """A router, in this process or in another one."""

    async def run(self) -> None: ...

    def mark_ready(self) -> None: ...

    def send(self, line: str) -> None: ...

    def retire(self, line: str) -> None: ...

    def terminate(self) -> None: ...


class OwnRouter:
    """A router in this process. It is not started again: this process ends if it fails."""

    def __init__(self, router: Router, parent: OwnParent) -> None:
        self._router = router
        self._parent = parent

    async def run(self) -> None:
        """Serve until cancelled, which begins its end and waits for it, or until it ends after `retire`."""
        running = asyncio.create_task(self._router.run())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._router.stop()
            await running
            raise

    def mark_ready(self) -> None: ...

    def send(self, line: str) -> None: ...

    def retire(self, line: str) -> None:
        self._parent.retires.set()

    def terminate(self) -> None:
        self._router.stop()


class SpawnedHere:
    """An engine that runs for one generation of routers or for several.

    handed  says which one runs already; None: it is started
    """

    def __init__(self, config: ServeConfig, folder: Path, handed: Handover | None = None) -> None:
        self._stack = contextlib.ExitStack()
        if handed is not None and handed.address is not None and handed.engine is not None:
            engine = SpawnedEngine(handed.address, engine_supervisor(config, folder, handed.address))
            engine.supervisor.adopt(handed.engine)
            if (private := folder_of(engine.address)) is not None:
                self._stack.callback(shutil.rmtree, private, ignore_errors=True)
        else:
            started = self._stack.enter_context(spawned_engine(config, folder))
            assert started is not None, "the settings ask for one"
            engine = started
        self.address, self.supervisor = engine
        self.task = asyncio.create_task(self.supervisor.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self._stack.close()


class Generation:
    """The routers that were started together: those that serve, their successors, or their predecessors.

    number  0 for the first ones
    engine  the spawned one that they use, if they do
    """

    def __init__(self, number: int, engine: SpawnedHere | None) -> None:
        self.number = number
        self.engine = engine
        self.routers: list[Child] = []
        self.listening: set[int] = set()
        self.ready: set[int] = set()  # routers that have an engine
        self.is_serving = asyncio.Event()  # all are both
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def restarts(self) -> int:
        return self.engine.supervisor.restarts if self.engine else 0

    def start(self) -> None:
        self.tasks = [asyncio.create_task(router.run()) for router in self.routers]

    def check(self) -> None:
        if len(self.listening & self.ready) == len(self.routers):
            self.is_serving.set()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
