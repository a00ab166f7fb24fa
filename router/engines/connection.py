"""One connection to an engine: what is sent on it, what may come, and whether the engine's loop still answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from pagoda.engine.v1 import engine_pb2

from .checking import Checks
from .transport import EngineLink

log = logging.getLogger("pagoda.router")

# Seconds between two pings, or this part of a short hang timeout. A hang is noticed two pings late at most.
PING_S, PING_PART = 1.0, 1 / 32
# An engine becomes suspect after so many seconds without an answer, or this part of a short hang timeout.
SUSPECT_S, SUSPECT_PART = 1.0, 1 / 8


class EngineHangs(Exception):
    """The engine's loop has answered nothing for the hang timeout."""


class Connection:
    """A connection to an engine, from the moment it is open. Close it.

    label           the engine in a line of the log
    hang_timeout_s  an engine whose loop answers nothing for this long counts as dead
    is_waited_for   whether an engine that answers no pings owes output
    on_suspect      called whenever `is_suspect` changes
    is_suspect      the engine's loop is late with an answer: it computes a long step, or hangs
    checks          what the engine may send
    """

    def __init__(
        self,
        link: EngineLink,
        label: str,
        hang_timeout_s: float,
        *,
        is_waited_for: Callable[[], bool],
        on_suspect: Callable[[], None],
    ) -> None:
        self.checks = Checks()
        self.is_suspect = False
        self._link = link
        self._label = label
        self._hang_timeout_s = hang_timeout_s
        self._is_waited_for = is_waited_for
        self._on_suspect = on_suspect
        self._outgoing: asyncio.Queue[engine_pb2.RouterMessage] = asyncio.Queue()
        self._helpers: list[asyncio.Task[None]] = []
        self._fault: Exception | None = None  # what has ended a helper
        self._answers_pings = False  # an engine of an earlier version does not; see _ask
        self._owes_answer_since: float | None = None  # None: its loop has answered everything

    async def read(self) -> engine_pb2.EngineMessage | None:
        """Return the next message, which has been checked; None: the engine has closed the connection.

        Raises EngineHangs, InvalidMessage, NotTrusted, OSError, and what has ended a helper.
        """
        message = await self._next()
        if message is None:
            if self._fault is not None:
                raise self._fault
            return None
        self.checks.check(message)
        if not self._answers_pings or message.HasField("pong"):
            self._owes_answer_since = None
            self._suspect(False)
        return message

    async def _next(self) -> engine_pb2.EngineMessage | None:
        if self.checks.has_greeted:
            return await self._link.read()
        try:
            async with asyncio.timeout(self._hang_timeout_s):
                return await self._link.read()
        except TimeoutError:
            raise EngineHangs from None

    def greeted(self, *, answers_pings: bool) -> None:
        """Send messages from now on, and ask the engine's loop for answers: the engine has said hello."""
        self._answers_pings = answers_pings
        self._helpers = [asyncio.create_task(self._guarded(helper)) for helper in (self._watch, self._send)]
        self._ask()

    def post(self, message: engine_pb2.RouterMessage) -> None:
        """Send a message to an engine that has greeted. What finds no room waits; admission bounds it."""
        self.checks.sends(message)
        if not (self._outgoing.empty() and self._link.is_free and self._link.try_write(message)):
            self._outgoing.put_nowait(message)

    def close(self) -> None:
        for helper in self._helpers:
            helper.cancel()
        self._link.close()

    async def _guarded(self, helper: Callable[[], Awaitable[None]]) -> None:
        """Close the link when a helper ends, whatever ends it: the connection is useless without."""
        try:
            await helper()
        except Exception as error:
            self._fault = error
        finally:
            self._link.close()

    async def _send(self) -> None:
        try:
            while True:
                await self._link.write(await self._outgoing.get())
        except ConnectionError as error:
            log.warning("cannot write to the engine at %s: %s", self._label, error)

    async def _watch(self) -> None:
        """Ask the engine for a sign of its loop, again and again. Raises EngineHangs."""
        ping_s = min(PING_S, PING_PART * self._hang_timeout_s)
        while True:
            before = time.monotonic()
            await asyncio.sleep(ping_s)
            now = time.monotonic()
            if self._owes_answer_since is None:
                self._ask()
                continue
            self._owes_answer_since += now - before - ping_s  # when this process stood still, it read no answer
            late_s = now - self._owes_answer_since
            if late_s > self._hang_timeout_s:
                raise EngineHangs
            self._suspect(late_s >= min(SUSPECT_S, SUSPECT_PART * self._hang_timeout_s))

    def _suspect(self, is_suspect: bool) -> None:
        if is_suspect != self.is_suspect:
            self.is_suspect = is_suspect
            self._on_suspect()

    def _ask(self) -> None:
        """Ask for an answer of the engine's loop. For an engine that does not know pings, any message is one."""
        if self._answers_pings:
            self.post(engine_pb2.RouterMessage(ping=engine_pb2.Ping(takes_goodbye=True)))
        if self._answers_pings or self._is_waited_for():
            self._owes_answer_since = time.monotonic()
