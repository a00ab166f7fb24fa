"""One router's session: what it has not been sent yet, and the order in which that is written."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Hashable, Iterator
from typing import Any, TypeAlias

from pagoda.engine.v1 import engine_pb2

from ...channel.link import Link
from ..loop.loop import LoadSnapshot
from ..scheduling.tenants import TenantTable
from .cache_feed import Feed, Follower
from .codec import PendingOutput, tenants_message

LOAD_EVERY_S = 0.25  # to routers for whom a step did nothing; with many of them, theirs would cost more than the rest
STALL_TIMEOUT_S = 30.0  # a router that takes no message for this long is dropped

RouterLink: TypeAlias = Link[engine_pb2.RouterMessage, engine_pb2.EngineMessage]


class Session:
    """A router's session. The event loop's thread owns it.

    pending           what steps have produced since the last message
    ids               the router's sequence numbers → ours
    traces            the parts of each trace that it has asked for
    followers         of the prefix cache
    takes_goodbye     the router has announced that it knows it
    follows_adapters  the router is sent the list of adapters whenever it changes
    """

    def __init__(self, epoch: int) -> None:
        self.pending = PendingOutput()
        self.ids: dict[int, int] = {}
        self.traces: list[Iterator[engine_pb2.Trace]] = []
        self.followers: dict[Feed[Any], Follower] = {}
        self.takes_goodbye = self.follows_adapters = False
        self.wake = asyncio.Event()  # set: there is something to write
        self._epoch = epoch
        self._link: RouterLink | None = None  # once it is greeted
        self._owed: dict[Hashable, dict[str, Any]] = {}  # fields of messages, oldest first
        self._unsent: engine_pb2.EngineMessage | None = None  # a message that was made and found no room
        self._tenants: TenantTable | None = None  # the table that was sent last
        self._taken_at = -math.inf  # when the load was sent last
        self._timer: asyncio.TimerHandle | None = None  # sends a load that comes too soon after another
        self._is_writing = False

    @property
    def is_behind(self) -> bool:
        """Whether the router has not been sent everything, traces and the cache's changes aside."""
        return self._has_output or self._is_writing or bool(self._owed)

    def report(self, load: LoadSnapshot) -> None:
        """Send what is pending, and the load with it. A load alone waits if another one has just been sent."""
        self.pending.load = load
        if self.pending.has_output or (wait_s := self._taken_at + LOAD_EVERY_S - time.monotonic()) <= 0:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._send)

    def owe(self, key: Hashable, **fields: object) -> None:
        """Send a message of these fields. It replaces one of the same key that has not been sent."""
        self._owed[key] = fields
        self.wake.set()

    async def write(self, link: RouterLink, **greeting: object) -> None:
        """Greet the router, and write what it is owed, for as long as the session lasts. Raises TimeoutError."""
        await self._write(link, self._message(**greeting))
        self._link = link
        while True:
            await self.wake.wait()
            self.wake.clear()
            if self._has_output:
                await self._write(link, self._take())
            # One of these at a time, so that no token waits for many of them.
            if self._owed:
                await self._write(link, self._message(**self._owed.pop(next(iter(self._owed)))))
                self.wake.set()
            for follower in list(self.followers.values()):
                if (news := follower.take()) is not None:
                    await self._write(link, self._message(**news))
                    self.wake.set()
            if self.traces:
                if (part := next(self.traces[0], None)) is None:
                    del self.traces[0]
                else:
                    await self._write(link, self._message(trace=part))
                self.wake.set()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for follower in self.followers.values():
            follower.leave()

    async def _write(self, link: RouterLink, message: engine_pb2.EngineMessage) -> None:
        self._is_writing = True
        try:
            async with asyncio.timeout(STALL_TIMEOUT_S):
                await link.write(message)
        except TimeoutError:
            raise TimeoutError(f"it took no message for {STALL_TIMEOUT_S:.0f} s") from None
        finally:
            self._is_writing = False

    def _send(self) -> None:
        """Send what is pending, within this call if the link has room, else as soon as it has."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._has_output:  # it left with something else
            return
        if self._link is None or self.wake.is_set() or not self._link.is_free:
            self.wake.set()
            return
        message = self._take()
        if not self._link.try_write(message):
            self._unsent = message
            self.wake.set()

    @property
    def _has_output(self) -> bool:
        return self._unsent is not None or self.pending.load is not None or self.pending.has_output

    def _take(self) -> engine_pb2.EngineMessage:
        if self._unsent is not None:
            message, self._unsent = self._unsent, None
            self.wake.set()  # for what has become pending since
            return message
        taken, self.pending = self.pending, PendingOutput()
        self._taken_at = time.monotonic()
        step = taken.to_message()
        if taken.load and taken.load.tenants is not self._tenants:
            self._tenants = taken.load.tenants
            step.tenants.CopyFrom(tenants_message(self._tenants))
        return self._message(step=step)

    def _message(self, **fields: object) -> engine_pb2.EngineMessage:
        return engine_pb2.EngineMessage(epoch=self._epoch, **fields)  # type: ignore[arg-type]
