"""One request on the channel: holds the engine's output until the handler takes it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagoda.engine.v1 import engine_pb2

from ..errors import PagodaError

WOKEN_AT_ONCE = 8  # streams, which then write their tokens in one turn of the event loop; twice as many when it is late
GIVES_WAY_S = 0.02  # for how long tokens give way to refusals and to first tokens; after it they are late
REFUSALS_FOLLOW_S = 0.001  # so soon after another one, a refusal belongs to the same burst


class Wake:
    """An event for one waiter, cheaper than asyncio.Event, which keeps a list of waiters.

    Set it from the event loop's thread. It stays set until the waiter has seen it.
    """

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
        """Wait until it is set, and clear it."""
        if not self._is_set:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False


@dataclass(slots=True)
class SequenceInbox:
    """Output of one sequence that the handler has not taken yet.

    readings  what was read from its prompt; all of it comes before the end, and before the first token
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[engine_pb2.Logprobs] = field(default_factory=list)  # one per token if requested
    ended: engine_pb2.Ended | None = None
    readings: list[engine_pb2.Reading] = field(default_factory=list)


class EngineStream:
    """One request on the channel: n sequences, one reader. Tokens accumulate while the reader writes to its client."""

    def __init__(
        self,
        first_sequence: int,
        count: int,
        *,
        abort: Callable[[list[int]], None],
        forget: Callable[[EngineStream], None],
        on_start: Callable[[], None],
    ) -> None:
        """
        abort     asks the engine to end sequences
        forget    has the channel deliver nothing more to the stream
        on_start  called whenever a sequence starts to be computed, and when it ends
        """
        self.first_sequence = first_sequence
        self.inboxes = [SequenceInbox() for _ in range(count)]
        self.error: PagodaError | None = None
        self.wake = Wake()
        self.has_begun = False  # a token has arrived
        self.adapter = b""  # the identity of the one that it is computed with; empty: none
        self.is_due = False  # its reader is to be woken
        self.live = set(range(count))  # sequences that have not ended
        self.on_start = on_start
        self._abort = abort
        self._forget = forget

    async def wait(self) -> None:
        """Wait until an inbox holds something. Raises EngineLost once all that a lost engine sent has been taken."""
        if self.error is None:
            await self.wake.wait()
        if self.error is not None and not self.has_output:
            raise self.error

    @property
    def has_output(self) -> bool:
        """Whether the handler has something to take."""
        return any(inbox.tokens or inbox.ended is not None for inbox in self.inboxes)

    def abort(self, index: int | None = None) -> None:
        """Ask the engine to end one sequence, or all; their ends still arrive."""
        which = self.live if index is None else self.live & {index}
        self._abort([self.first_sequence + at for at in which])

    def close(self) -> None:
        """End the sequences that still run, and stop delivery."""
        self.abort()
        self._forget(self)


class Wakeups:
    """Wakes the readers of streams in turn: a few in each turn of the event loop.

    A reader that was woken writes to its client, which takes about as long as the loop needs to refuse a call. If a
    step woke all readers at once, whatever arrived meanwhile would wait until every token was written. Between two
    turns the loop looks for what has arrived, so calls, cancels and scrapes come between the writes.

    While calls are refused one after another, the readers wait, but first tokens do not: a burst is answered sooner,
    and what the engine sends meanwhile shares a message with what waits. Readers who are late wait for nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: deque[EngineStream] = deque()
        self._others: deque[tuple[float, EngineStream]] = deque()  # since when they wait
        self._next: asyncio.Handle | None = None  # the next turn, while any wait
        self._refused_at = -math.inf

    def add(self, stream: EngineStream) -> None:
        """Wake a stream's reader when it is its turn: first tokens come first. A stream that waits keeps its place."""
        if not stream.is_due:
            stream.is_due = True
            if stream.has_begun:
                self._others.append((self._clock(), stream))
            else:
                self._first.append(stream)

    def start(self) -> None:
        """Wake the first few at once, unless others wait for their turn."""
        if self._next is None:
            self._wake_some()
        elif self._first:
            self._next.cancel()
            self._wake_some()

    @property
    def are_late(self) -> bool:
        """Whether a reader has waited for so long that nothing new should go first."""
        return bool(self._others) and self._clock() >= self._others[0][0] + GIVES_WAY_S

    def give_way(self) -> None:
        """Note that a call is being refused."""
        self._refused_at = self._clock()

    def _wake_some(self) -> None:
        self._next = None
        are_late = self.are_late
        is_burst = not are_late and self._clock() < self._refused_at + REFUSALS_FOLLOW_S
        for index in range(WOKEN_AT_ONCE << are_late):
            if self._others and not is_burst and (not self._first or (are_late and index % 4)):
                _, stream = self._others.popleft()
            elif self._first:
                stream = self._first.popleft()
            else:
                break
            stream.is_due = False
            stream.wake.set()
        loop = asyncio.get_running_loop()
        if self._first or (self._others and not is_burst):
            self._next = loop.call_soon(self._wake_some)
        elif self._others:
            self._next = loop.call_later(REFUSALS_FOLLOW_S, self._wake_some)


def time_in_engine(ended: engine_pb2.Ended) -> float:
    """Seconds from the engine's receipt of a sequence to its end."""
    return ended.queue_s + ended.prefill_s + ended.decode_s + ended.preempted_s
