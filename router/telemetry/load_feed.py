"""Bound what a flood of Control's dearer calls costs: one load for all that watch it, and limits of calls at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeAlias

from pagoda.v1 import control_pb2

from ...settings.sampling import Interval
from ..errors import ResourceExhausted
from ..request.client_call import Context
from ..request.fields import check_number
from ..tenants.own_view import seen_load

MAX_WATCHERS = 256
MAX_WRITES_A_SECOND = 500  # of all watchers: each takes about as much of the event loop as a token
LOAD_AGE_S = 0.025  # of the load that watchers share; half of the shortest interval
MAX_TRACES = 4  # calls of GetStepTrace, each of which may hold megabytes
RETRY_S = 1.0

Load: TypeAlias = control_pb2.Load


class Places:
    """Calls of one method at once, up to a limit. A context manager around each call; raises ResourceExhausted."""

    def __init__(self, method: str, most: int) -> None:
        self.taken = 0
        self._method = method
        self._most = most

    def __enter__(self) -> None:
        if self.taken >= self._most:
            message = f"{self.taken} calls of {self._method} are running, the limit is {self._most}"
            raise ResourceExhausted(
                message, retry_after_s=RETRY_S, queue_depth=self.taken, reason=f"TOO_MANY_{self._method.upper()}"
            )
        self.taken += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.taken -= 1


class LoadFeed:
    """Makes one load for all that watch it. Where many watch, it writes to each less often."""

    def __init__(self, make: Callable[[], Awaitable[Load]]) -> None:
        self._make = make
        self._making: asyncio.Future[Load] | None = None
        self._made_at = -math.inf
        self._watchers = Places("WatchLoad", MAX_WATCHERS)

    async def watch(self, request: control_pb2.WatchLoadRequest, context: Context) -> None:
        """Serve a WatchLoad call until its client cancels it. Raises InvalidArgument, ResourceExhausted."""
        interval_s = watch_interval_s(request)
        with self._watchers:
            while True:
                load = await self._latest()
                await context.write(seen_load(load))  # a slow reader gets none meanwhile, and the latest then
                await asyncio.sleep(max(interval_s, self._watchers.taken / MAX_WRITES_A_SECOND))

    async def _latest(self) -> Load:
        """A load that was made within LOAD_AGE_S. All watchers get the same: do not change it."""
        now = time.monotonic()
        if self._making is None or (self._making.done() and now - self._made_at > LOAD_AGE_S):
            self._made_at = now
            self._making = asyncio.ensure_future(self._make())
        return await asyncio.shield(self._making)  # the call that began it may be cancelled


def watch_interval_s(request: control_pb2.WatchLoadRequest) -> float:
    """The interval of a WatchLoad call, checked. Raises InvalidArgument."""
    interval_s = request.interval_s if request.HasField("interval_s") else 1.0
    check_number(interval_s, "interval_s", Interval(0.05, 3600))
    return interval_s
