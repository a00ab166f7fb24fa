"""A Generate or Resume call after submission: from the engine's output to the messages that the client gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2

from ..engines.stream import SequenceInbox, time_in_engine
from ..errors import DeadlineExceeded, Internal, InvalidArgument, ResourceExhausted, Unavailable
from ..text.tokenizer import Tokenizer
from .output import (
    ClientWriter,
    SequenceOutput,
    write_bytes,
    write_logprobs,
    write_records,
)
from .parsing import Parsing
from .resuming import KeepingOutput, KeptStream, Progress
from .token_times import TokenTimes
from .validation import GenerateParams

# What an engine counts of a sequence, by the names that the client gets.
_USED, _TIMED = (
    [name for name in message.DESCRIPTOR.fields_by_name if name in engine_pb2.Ended.DESCRIPTOR.fields_by_name]
    for message in (inference_pb2.Usage, inference_pb2.Timing)
)
_PROMPT_AT_ONCE = 256  # tokens: with all logprobs a message of about 100 KB, which stock clients accept


class Stream(Protocol):
    """What comes of a request from an engine: see EngineStream."""

    inboxes: list[SequenceInbox]

    async def wait(self) -> None: ...

    def abort(self, index: int | None = None) -> None: ...

    def close(self) -> None: ...


class OutputRoom:
    """What is reserved for an output whose length the client left open. It grows by half whenever the output does.

    num_tokens  reserved for all sequences together
    most        tokens that they can have
    """

    def __init__(self, num_tokens: int, most: int, *grow: Callable[[int], None]) -> None:
        self.num_tokens = num_tokens
        self._most = most
        self._grow = grow

    def hold(self, num_tokens: int) -> None:
        """Make sure that so many fit."""
        while self.num_tokens < num_tokens:
            more = max(1, min(self.num_tokens // 2, self._most - self.num_tokens))
            self.num_tokens += more
            for grow in self._grow:
                grow(more)


class GenerateCall:
    """Takes the engine's output and writes what the client asked for.

    times    counts when tokens are written; None: nothing does
    parsing  how answers are parsed; None: all of them is text
    room     grows with the output; None: all of it is reserved
    left     of each engine that the stream has left behind and that goes on: how its sequences ended there
    """

    def __init__(
        self,
        params: GenerateParams,
        prompt_len: int,
        tokenizer: Tokenizer,
        writer: ClientWriter,
        received: float,
        kept: KeptStream | None = None,
        times: TokenTimes | None = None,
        parsing: Parsing | None = None,
        room: OutputRoom | None = None,
    ) -> None:
        self.times = times
        self.left: list[Sequence[SequenceInbox]] = []
        self._room = room
        self._prompt_len = prompt_len
        self._writer = writer
        self._received = received
        self.first_written = None if kept is None else kept.first_written
        self._token_bytes = tokenizer.token_bytes if params.has_token_bytes else None
        skips, kept_texts = not params.keeps_special_tokens, parsing.format.markers if parsing else ()
        output = SequenceOutput if kept is None else partial(KeepingOutput, kept)
        self._outputs = [
            output(
                index,
                tokenizer.detokenizer(skips, kept_texts) if params.has_text else None,
                params.stop,
                params.min_tokens,
                params.includes_stop,
                self._token_bytes,
                parsing.parser(index) if parsing else None,
            )
            for index in range(params.n)
        ]
        self._unfinished = params.n
        self._response = inference_pb2.GenerateResponse(request_id=params.request_id)  # reused

    @property
    def num_tokens(self) -> int:
        return sum(output.num_tokens for output in self._outputs)

    @property
    def progress(self) -> Progress:
        """How far the sequences are. One that has met a stop string needs no more."""
        return [None if output.ended or output.stop is not None else output.ids for output in self._outputs]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [output.num_tokens for output in self._outputs]

    @property
    def reasons(self) -> list[inference_pb2.FinishReason]:
        """Why each sequence that has ended did."""
        return [output.finished().reason for output in self._outputs if output.ended is not None]

    async def _write_prompt(self, ids: Sequence[int], readings: Iterable[engine_pb2.Reading] = ()) -> None:
        """Write the prompt; with log-probabilities, in parts that other streams' messages may come between."""
        found = {each.at: each for reading in readings for each in reading.logprobs}
        at_once = _PROMPT_AT_ONCE if found else len(ids)
        for start in range(0, len(ids), at_once):
            response = inference_pb2.GenerateResponse(request_id=self._response.request_id, prompt={})
            write_records(response.prompt.tokens, ids[start : start + at_once])
            for index, token in enumerate(response.prompt.tokens, start):
                if (logprobs := found.get(index)) is not None:
                    write_logprobs(token, logprobs)
            if self._token_bytes is not None:
                write_bytes(response.prompt.tokens, self._token_bytes)
            await self._writer.write(response)

    async def replay(self, kept: KeptStream, counts: Sequence[int], prompt: Sequence[int]) -> None:
        """Write what the client of a kept stream lacks, and every end.

        counts  tokens that the client has of each sequence
        prompt  token ids to write before all else
        """
        if prompt:
            await self._write_prompt(prompt)
        for output, sequence, count in zip(self._outputs, kept.sequences, counts, strict=True):
            assert isinstance(output, KeepingOutput), "this call knows that its stream is kept"
            for inbox, is_lacking in sequence.inboxes(count):
                if output.replay(inbox, self._response.tokens) and (is_lacking or not self._response.tokens.tokens):
                    await self._writer.write(self._response)
                await self._write_more(output, only_late=not is_lacking)
                if not is_lacking:
                    await asyncio.sleep(0)  # other streams write between two parts
            if output.ended is not None:
                self._unfinished -= 1
                await self._write_finished(output, is_last=not self._unfinished)

    async def run(self, stream: Stream, prompt: Sequence[int] = (), leaves: Callable[[], bool] = lambda: False) -> bool:
        """Stream until every sequence has ended. Raises EngineLost, or an error if the engine ended one irregularly.

        After EngineLost, `run` goes on with another stream. So it does after False, which `leaves` has caused.

        prompt  token ids to write before all else. Nothing is written while the request waits: it may be evicted then
        leaves  asked after each message: says whether to go on with another stream
        """
        while self._unfinished:
            await stream.wait()
            if prompt:
                readings = [each for inbox in stream.inboxes for each in inbox.readings]
                await self._write_prompt(prompt, readings)
                prompt = ()
            for output, inbox in zip(self._outputs, stream.inboxes, strict=True):
                if output.ended is None and (inbox.tokens or inbox.ended is not None):
                    await self._advance(output, inbox, stream)
            if self._unfinished and leaves():
                return False
        return True

    async def _advance(self, output: SequenceOutput, inbox: SequenceInbox, stream: Stream) -> None:
        num_before = output.num_tokens
        if output.take(inbox, self._response.tokens):
            now = time.monotonic()
            if self.times is not None and (count := output.num_tokens - num_before):
                if output.written_at:
                    self.times.between.add((now - output.written_at) / count, count)
                elif self.first_written is None:
                    self.times.first.add(now - self._received)
                output.written_at = now
            if self.first_written is None:
                self.first_written = now
            await self._writer.write(self._response)
            if output.more:
                await self._write_more(output)
        if self._room is not None:
            self._room.hold(self.num_tokens)
        if output.ended is not None:
            raise_if_failed(output.ended)
            self._unfinished -= 1
            await self._write_finished(output, is_last=not self._unfinished)
        elif output.stop is not None:
            stream.abort(output.index)  # only the router knows stop strings; tokens arrive until the engine reads this

    async def _write_more(self, output: SequenceOutput, *, only_late: bool = False) -> None:
        """Write what an output has taken, behind its first message.

        only_late  no messages with tokens, but those without, which only an end adds
        """
        while output.take_more(self._response.tokens):
            if not (only_late and self._response.tokens.tokens):
                await self._writer.write(self._response)

    async def _write_finished(self, output: SequenceOutput, *, is_last: bool) -> None:
        response = inference_pb2.GenerateResponse(request_id=self._response.request_id, finished=output.finished())
        if is_last:
            response.usage.CopyFrom(self.usage())
            response.timing.CopyFrom(self.timing())
        await self._writer.write(response)

    def usage(self) -> inference_pb2.Usage:
        """The tokens so far. Cached and drafted tokens count those of sequences that have ended."""
        ends = self._ends
        usage = inference_pb2.Usage(**{name: sum(getattr(end, name) for end in ends) for name in _USED})
        usage.prompt_tokens, usage.completion_tokens = self._prompt_len, self.num_tokens
        # A sequence that was resumed may have found some of its own output in the cache.
        usage.cached_tokens = min(max((end.cached_tokens for end in ends), default=0), self._prompt_len)
        usage.reasoning_tokens = sum(output.num_reasoning for output in self._outputs)
        return usage

    def timing(self) -> inference_pb2.Timing:
        """The times so far. Those in the engine are 0 until a sequence has ended."""
        now = time.monotonic()
        first_s, total_s = (self.first_written or now) - self._received, now - self._received
        return timing_of(self._ends, first_s, total_s)

    @property
    def _ends(self) -> list[engine_pb2.Ended]:
        """Of each sequence that has ended, what all its engines have counted."""
        return [
            total_of([*(ended for inboxes in self.left if (ended := inboxes[output.index].ended)), output.ended])
            for output in self._outputs
            if output.ended is not None
        ]


def total_of(ends: Sequence[engine_pb2.Ended]) -> engine_pb2.Ended:
    """Add up what several engines have counted of one sequence. What was cached, the first one has found."""
    if len(ends) == 1:
        return ends[0]
    total = engine_pb2.Ended(reason=ends[-1].reason, cached_tokens=ends[0].cached_tokens)
    for name in {*_USED, *_TIMED} - {"cached_tokens"}:
        setattr(total, name, sum(getattr(each, name) for each in ends))
    return total


def timing_of(ends: Iterable[engine_pb2.Ended], first_s: float, total_s: float) -> inference_pb2.Timing:
    """The times and counts of the slowest sequence."""
    slowest = max(ends, key=time_in_engine, default=engine_pb2.Ended())
    spent = {name: getattr(slowest, name) for name in _TIMED}
    return inference_pb2.Timing(**spent, time_to_first_token_s=first_s, total_s=total_s)


def raise_if_failed(ended: engine_pb2.Ended, field: str = "input") -> None:
    """Raise the error that ends the whole call, if the engine ended a sequence irregularly.

    field  of the request, that the sequence is made from; the engine may name another
    """
    match ended.reason:
        case engine_pb2.END_REASON_DEADLINE:
            raise DeadlineExceeded("the deadline passed or can no longer be met")
        case engine_pb2.END_REASON_REJECTED if ended.field == "adapter":  # a retry learns which
            raise Unavailable("the adapter was unloaded or replaced before the request began", retry_after_s=0.1)
        case engine_pb2.END_REASON_REJECTED:
            raise InvalidArgument(ended.field or field, ended.detail)
        case engine_pb2.END_REASON_FAILED:
            raise Internal(f"sequence failed in the engine: {ended.detail}")
        case engine_pb2.END_REASON_OVERLOADED:
            raise ResourceExhausted(ended.detail, retry_after_s=1.0)
