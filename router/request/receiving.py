"""Read the messages of calls, within bounds of memory, time and work; a handler decides when.

Handlers are registered as if their requests were streams, which looks the same on the wire: gRPC then reads nothing
before the handler asks, and gives it bytes. What was refused before costs no memory and no parsing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from ..errors import InvalidArgument, ResourceExhausted
from ..text.turns import turn
from .client_call import ClientCall, sender_clock
from .fields import Limits, check_size
from .wire import Malformed, check_entries, most_entries

log = logging.getLogger("pagoda.router")

SMALL_BYTES = 16 << 10  # up to here the event loop parses a message itself: it costs less than a millisecond
LARGE_BYTES = 64 << 10  # above this the messages in flight share LARGE_TOTAL_BYTES
LARGE_TOTAL_BYTES = 64 << 20
READING_TOTAL_BYTES = 256 << 20  # of messages that are being read, each counted as the largest that is allowed
FEWEST = 4  # messages of the largest size that both totals admit, whatever that size is
CONTENDED_S = 1.0  # to send a message in, while others wait for their turn
LOOKS_AGAIN_S = 0.1  # a clock may have stood, so that its time is not over when a timer is
RETRY_LARGE_S = 1.0

Parse: TypeAlias = Callable[[bytes, Limits], "M"]  # raises InvalidArgument, DecodeError or Malformed
M = TypeVar("M", bound=Message)
Result = TypeVar("Result")


def from_protobuf(kind: type[M], most: Callable[[Limits], Mapping[str, int]] = most_entries) -> Parse[M]:
    """What parses a message of a protocol from its bytes.

    most  the limits of its repeated fields, by full name
    """

    def parse(raw: bytes, limits: Limits) -> M:
        if len(raw) > SMALL_BYTES:
            check_entries(raw, kind.DESCRIPTOR, most(limits))  # type: ignore[arg-type]  # the C extension's
        return kind.FromString(raw)

    return parse


class Messages:
    """Reads and parses the messages of this process's calls.

    max_bytes  the largest message that gRPC accepts
    timeout_s  how long a client may take to send a message
    """

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self.max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._room = max(READING_TOTAL_BYTES // max_bytes, FEWEST)
        self._reads: set[_Read] = set()  # under way
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._large_bytes = 0
        self._max_large_bytes = max(LARGE_TOTAL_BYTES, FEWEST * max_bytes)
        # One thread: several would hold up the event loop for as many turns of the interpreter's lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="messages")
        self._malformed = _RareLog("%d malformed messages refused")

    async def read(self, call: ClientCall, *, most: int | None = None) -> Received:
        """Read a call's message. Close the result with `release` or a `with` block, and await `check_end` before that.

        most  its bytes, at most; None: as many as gRPC accepts

        Raises InvalidArgument if there is none or it is longer; ResourceExhausted if the client takes too long to send
        it, or too many large messages are in flight.
        """
        raw = await self._next(call)
        if raw is grpc.aio.EOF:
            raise InvalidArgument("request", "is missing")
        if most is not None:
            check_size(len(raw), "request", most)
        return Received(self, raw)

    async def check_end(self, call: ClientCall) -> None:
        """Raise InvalidArgument if the client sends another message, ResourceExhausted if it does not end its side."""
        if await self._next(call) is not grpc.aio.EOF:
            raise InvalidArgument("request", "is followed by another message; send one")

    async def _next(self, call: ClientCall) -> Any:
        """The client's next message in bytes, or EOF."""
        while len(self._reads) >= self._room:
            await self._turn()
        try:
            async with asyncio.timeout(None) as timeout:
                read = _Read(timeout, sender_clock(call), CONTENDED_S if self._waiting else self._timeout_s)
                self._reads.add(read)
                try:
                    return await call.read()
                finally:
                    read.end()
                    self._reads.remove(read)
                    self._admit()
        except TimeoutError:
            message = "the client has not sent its request in time"
            raise ResourceExhausted(message, reason="SENDER_STALLED") from None

    async def _turn(self) -> None:
        """Wait until another read has ended. Those that take long now have to end soon."""
        if not self._waiting:
            for read in self._reads:
                read.limit(CONTENDED_S)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._admit()  # it was this one's turn
            raise

    def _admit(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def take(self, num_bytes: int) -> None:
        if self._large_bytes + num_bytes > self._max_large_bytes:
            raise ResourceExhausted("too many large messages are in flight", retry_after_s=RETRY_LARGE_S)
        self._large_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._large_bytes -= num_bytes

    async def parse(self, raw: bytes, work: Callable[[bytes], Result]) -> Result:
        """Parse a message, check it and convert it, in a thread if it is not small.

        Raises InvalidArgument for bytes that are no such message, and what `work` raises.
        """
        try:
            return await self.run(lambda: work(raw), len(raw))
        except (DecodeError, Malformed):
            self._malformed.add()
            raise InvalidArgument("request", "is malformed: not the protobuf message of this call") from None

    async def run(self, work: Callable[[], Result], num_bytes: int) -> Result:
        """Run work on a message of that size: here if it is small, else in the thread, one after another."""
        if num_bytes <= SMALL_BYTES:
            return work()

        def in_turn() -> Result:
            with turn(True):
                return work()

        context = copy_context()  # in which the work finds its caller
        return await asyncio.get_running_loop().run_in_executor(self._thread, context.run, in_turn)


class _Read:
    """A read that is under way, and that ends once its client has had its time.

    timeout  around the read
    clock    the client's
    limit_s  see `limit`
    """

    def __init__(self, timeout: asyncio.Timeout, clock: Callable[[], float], limit_s: float) -> None:
        self._timeout = timeout
        self._clock = clock
        self._began = clock()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.limit(limit_s)

    def limit(self, limit_s: float) -> None:
        """Give the client so many seconds in all."""
        self.end()
        left_s = self._began + limit_s - self._clock()
        if left_s > 0:
            self._timer = self._loop.call_later(max(left_s, LOOKS_AGAIN_S), self.limit, limit_s)
        elif not self._timeout.expired():
            self._timeout.reschedule(self._loop.time())

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Received:
    """A message that was read: holds its share of the bytes in flight until it is released."""

    def __init__(self, messages: Messages, raw: bytes) -> None:
        self._messages = messages
        self._raw = raw
        self._num_bytes = 0
        self.is_large = len(raw) > LARGE_BYTES
        if self.is_large:
            messages.take(len(raw))
            self._num_bytes = len(raw)

    async def parsed(self, work: Callable[[bytes], Result], *, is_last: bool = True) -> Result:
        """`Messages.parse` of this message, whose bytes are dropped the last time."""
        raw = self._raw
        if is_last:
            self._raw = b""
        return await self._messages.parse(raw, work)

    def release(self) -> None:
        self._messages.give_back(self._num_bytes)
        self._num_bytes, self._raw = 0, b""

    def __enter__(self) -> Received:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _RareLog:
    """Logs one line a second at most. Each says how many events it stands for."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self) -> None:
        self._count += 1
        if self._timer is None:
            self._log()

    def _log(self) -> None:
        self._timer = None
        if self._count:
            log.warning(self._text, self._count)
            self._count = 0
            self._timer = asyncio.get_running_loop().call_later(1.0, self._log)
