"""Wakes the one task that waits, at less cost than an asyncio.Event, which keeps a list of waiters for every turn."""

from __future__ import annotations

import asyncio


class Wake:
    """Set from the event loop's thread; what is set stays set until the waiter has seen it."""

    __slots__ = ("_is_set", "_loop", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until it is set; it is not afterwards."""
        if not self._is_set:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
