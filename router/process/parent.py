"""What a router has of the process that started it: a link over pipes, or within that process itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from ...runtime.followed import in_daemon
from .supervisor import ALIVE, ENDS, EngineKeeper

RETIRE = "retire"  # a line of the parent; all others are numbers

# Lines that a router sends to its parent. The addresses of gRPC and, if there is one, of HTTP follow the first.
STARTS = "starts "
SERVES = "serves"
ENGINE_READY = "engine ready"
ENGINE_HANGS = "engine hangs"
ADAPTERS = "adapters "  # a list in JSON follows


class Parent(EngineKeeper, Protocol):
    """Stands in for the engine's supervisor and for the announcer, which are the parent's."""

    def starts(self, address: str, url: str = "") -> None: ...

    def is_ready(self) -> None: ...

    def keep_adapters(self, adapters: list[dict[str, object]]) -> None:
        """Keep what an engine holds that the parent has spawned, for one that takes its place."""

    async def retired(self) -> None:
        """Wait until other routers serve the port."""


class _Lines:
    """Sends a router's events as lines."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send

    def starts(self, address: str, url: str = "") -> None:
        self._send(f"{STARTS}{address} {url}".rstrip())

    def is_ready(self) -> None:
        self._send(SERVES)

    def keep_adapters(self, adapters: list[dict[str, object]]) -> None:
        self._send(ADAPTERS + json.dumps(adapters))

    def mark_ready(self) -> None:
        self._send(ENGINE_READY)

    def kill(self) -> None:
        self._send(ENGINE_HANGS)


class OwnParent(_Lines):
    """The parent of a router in the parent's own process.

    restarts  how often its engine has been started again
    """

    def __init__(self, send: Callable[[str], None], restarts: Callable[[], int]) -> None:
        super().__init__(send)
        self._restarts = restarts
        self.retires = asyncio.Event()

    @property
    def restarts(self) -> int:
        return self._restarts()

    async def retired(self) -> None:
        await self.retires.wait()


class ParentLink(_Lines):
    """The parent of a router in a process of its own, which it reaches over standard input and output.

    The parent sends the number of restarts, once a second if it is answered, and RETIRE once others serve the port.

    Standard input ends when the parent dies. This process then exits, because an orphan would hold the port.
    """

    def __init__(self) -> None:
        super().__init__(lambda line: print(line, flush=True))
        self.restarts = 0
        self._retires = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._listen, name="parent-link", daemon=True).start()

    def answer_from(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer the parent from now on, as long as this event loop runs."""
        self._loop = loop
        self._send(ALIVE)

    def ends(self) -> None:
        """Say that this process is about to end: what is left of it answers nothing, and may take a while."""
        self._send(ENDS)

    async def retired(self) -> None:
        await in_daemon(self._retires.wait)

    def _listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == RETIRE:
                self._retires.set()
            else:
                self.restarts = int(line)
            if self._loop:
                with contextlib.suppress(RuntimeError):  # it has closed
                    self._loop.call_soon_threadsafe(self._send, ALIVE)
        os._exit(1)
