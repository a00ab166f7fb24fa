"""A router's channel to an engine in this process, which runs a step whenever a reader waits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from pagoda.engine.v1 import engine_pb2
from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.engine.core.step import StepOutput
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.engine.serving.codec import PendingOutput, sequences_from_submit
from pagoda_server.router.engines.stream import SequenceInbox

_ANY_ID = 1 << 32  # the size of a vocabulary that has every id


class Stepped(Protocol):
    @property
    def scheduler(self) -> Scheduler: ...

    def step(self) -> object: ...


class SteppedChannel:
    """
    submits  every request so far, as it was sent
    seqs     every sequence so far
    """

    def __init__(self, engine: Stepped) -> None:
        self.engine = engine
        self.submits: list[engine_pb2.Submit] = []
        self.seqs: list[Sequence] = []
        self._ids = itertools.count(1_000_000)  # others count from 0
        self._inboxes: dict[int, SequenceInbox] = {}
        self._take_output = engine.scheduler.take_output
        engine.scheduler.take_output = self._take  # type: ignore[method-assign]

    def submit(self, submit: engine_pb2.Submit, on_start: Callable[[], None] = lambda: None) -> SteppedStream:
        sent = engine_pb2.Submit.FromString(submit.SerializeToString())
        self.submits.append(sent)
        ids = [next(self._ids) for _ in range(sent.sampling.n)]
        seqs = sequences_from_submit(sent, ids, self.engine.scheduler.clock(), _ANY_ID)
        stream = SteppedStream(self, [seq.id for seq in seqs])
        for seq, inbox in zip(seqs, stream.inboxes, strict=True):
            self._inboxes[seq.id] = inbox
            self.engine.scheduler.add(seq)
        self.seqs += seqs
        return stream

    def _take(self) -> StepOutput:
        output = self._take_output()
        pending = PendingOutput(output.sequences, output.tokens)
        pending.logprobs = [(at, found) for at, found in enumerate(output.logprobs) if found]
        pending.ended = [(ended.seq.id, ended) for ended in output.ended]
        message = pending.to_message()
        for id, token in zip(message.sequences, message.tokens, strict=True):
            if id in self._inboxes:
                self._inboxes[id].tokens.append(token)
        for found in message.logprobs:
            if message.sequences[found.at] in self._inboxes:
                self._inboxes[message.sequences[found.at]].logprobs.append(found)
        for ended in message.ended:
            if ended.sequence in self._inboxes:
                self._inboxes[ended.sequence].ended = ended
        return output


class SteppedStream:
    def __init__(self, channel: SteppedChannel, ids: list[int]) -> None:
        self.inboxes = [SequenceInbox() for _ in ids]
        self._channel = channel
        self._ids = ids

    async def wait(self) -> None:
        self._channel.engine.step()
        await asyncio.sleep(0)

    def abort(self, index: int | None = None) -> None:
        self._channel.engine.scheduler.abort(self._ids if index is None else [self._ids[index]])

    def close(self) -> None:
        self.abort()
