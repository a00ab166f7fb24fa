"""One request's part of the channel: what the engine says of its sequences, until the handler takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagoda.engine.v1 import engine_pb2
from pagoda_server.router.engines.wake import Wake
from pagoda_server.router.errors import PagodaError

if TYPE_CHECKING:
    from pagoda_server.router.engines.channel import EngineChannel


@dataclass(slots=True)
class SequenceInbox:
    """What the engine has said of one sequence and the handler has not yet taken.

    score  that of a beam search's hypothesis
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[engine_pb2.Logprobs] = field(default_factory=list)  # one a token where asked for
    ended: engine_pb2.Ended | None = None
    score: float | None = None


class EngineStream:
    """One request on the channel: n sequences, one reader. Tokens gather while the reader is busy with its client."""

    def __init__(self, channel: EngineChannel, first_sequence: int, count: int) -> None:
        self.first_sequence = first_sequence
        self.inboxes = [SequenceInbox() for _ in range(count)]
        self.error: PagodaError | None = None
        self.wake = Wake()
        self.has_begun = False  # a token has come
        self.live = set(range(count))  # sequences whose end has not come
        self._channel = channel

    async def wait(self) -> None:
        """Until there is something in an inbox. Raises Unavailable when the engine is gone."""
        await self.wake.wait()
        if self.error:
            raise self.error

    def abort(self, index: int | None = None) -> None:
        """Asks the engine to end one sequence, or all; their ends still come."""
        which = self.live if index is None else self.live & {index}
        self._channel.abort([self.first_sequence + at for at in which])

    def close(self) -> None:
        """Ends what still runs and forgets the request: nothing more is delivered."""
        self.abort()
        self._channel.forget(self)


def time_in_engine(ended: engine_pb2.Ended) -> float:
    """Seconds from the engine's receipt of a sequence to its end."""
    return ended.queue_s + ended.prefill_s + ended.decode_s + ended.preempted_s
