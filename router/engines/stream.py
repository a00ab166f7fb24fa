"""One request on the channel: holds the engine's output until the handler takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pagoda.engine.v1 import engine_pb2
from pagoda_server.router.errors import PagodaError


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

    score     the score of a beam search's hypothesis
    readings  what was read from its prompt; all of it comes before the end, and before the first token
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[engine_pb2.Logprobs] = field(default_factory=list)  # one per token if requested
    ended: engine_pb2.Ended | None = None
    score: float | None = None
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
        forget    tells the channel to deliver nothing more to the stream
        on_start  called whenever a sequence starts to be computed, and when it ends
        """
        self.first_sequence = first_sequence
        self.inboxes = [SequenceInbox() for _ in range(count)]
        self.error: PagodaError | None = None
        self.wake = Wake()
        self.has_begun = False  # a token has arrived
        self.live = set(range(count))  # sequences that have not ended
        self.on_start = on_start
        self._abort = abort
        self._forget = forget

    async def wait(self) -> None:
        """Wait until an inbox holds something. Raises Unavailable when the engine is lost."""
        await self.wake.wait()
        if self.error:
            raise self.error

    def abort(self, index: int | None = None) -> None:
        """Ask the engine to end one sequence, or all; their ends still arrive."""
        which = self.live if index is None else self.live & {index}
        self._abort([self.first_sequence + at for at in which])

    def close(self) -> None:
        """End the sequences that still run, and stop delivery."""
        self.abort()
        self._forget(self)


def time_in_engine(ended: engine_pb2.Ended) -> float:
    """Seconds from the engine's receipt of a sequence to its end."""
    return ended.queue_s + ended.prefill_s + ended.decode_s + ended.preempted_s
