"""Responses to a client: each sequence's tokens as records, text and an end, and the writer that sends them."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2

from ..answers.events import CallPart, Event, Reasoning, Text, joined
from ..answers.parser import AnswerParser
from ..engines.stream import SequenceInbox
from ..errors import ResourceExhausted
from ..text.detokenizer import Detokenizer
from ..text.stop_strings import StopMatcher
from .client_call import ClientCall

TokenBytes: TypeAlias = Callable[[int], bytes]
FinishReason = inference_pb2.FinishReason
_FINISH_REASONS = {
    engine_pb2.END_REASON_STOP: FinishReason.FINISH_REASON_STOP,
    engine_pb2.END_REASON_LENGTH: FinishReason.FINISH_REASON_LENGTH,
    engine_pb2.END_REASON_ABORTED: FinishReason.FINISH_REASON_CANCELLED,
}


@dataclass(slots=True)
class Part:
    """One message's tokens and delta."""

    ids: list[int]
    logprobs: list[engine_pb2.Logprobs]
    event: Event | None


class SequenceOutput:
    """Turns one sequence's tokens into what its client asked for.

    Stop strings are looked for in the text as the model writes it; a parser then separates its parts. A message has
    one delta, so tokens of several parts become several messages. A token has at most one delta, too, and a second one
    waits for the next token: what a client has therefore follows from how many tokens it has, whatever came together,
    and a stream can be resumed between any two messages.

    detokenizer    None if the client wants no text
    stops          stop strings, looked for after the first min_tokens tokens
    includes_stop  whether the text includes the stop string, or the stop token's text, that ended the sequence
    token_bytes    gives a token's bytes; None if the client does not want them
    parser         separates reasoning and calls from the text; None: all is text

    ids            the tokens that its client got
    num_reasoning  tokens from the reasoning's opening marker to its closing one
    more           messages that follow the one that `take` has filled in: see `take_more`
    stop           the stop string that was found; empty: the parser has found the end
    ended          the engine's end, once `take` has met it
    written_at     when its last tokens were written; 0: none were
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer | None,
        stops: Sequence[str],
        min_tokens: int,
        includes_stop: bool = False,
        token_bytes: TokenBytes | None = None,
        parser: AnswerParser | None = None,
    ) -> None:
        self.index = index
        self.ids = array("I")
        self.num_reasoning = 0
        self.more: deque[Part] = deque()
        self.written_at = 0.0
        self.stop: str | None = None
        self.ended: engine_pb2.Ended | None = None
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._includes_stop = includes_stop
        self._token_bytes = token_bytes
        self._parser = parser
        self._events: deque[Event] = deque()  # that no message has taken up

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def take(self, inbox: SequenceInbox, into: inference_pb2.Tokens) -> bool:
        """Empty the inbox into a message. Returns False if there is nothing to send.

        `into` may hold an earlier message: reusing one costs half as much as making one.
        """
        ids, logprobs, ended = inbox.tokens, inbox.logprobs, inbox.ended
        inbox.tokens, inbox.logprobs, inbox.ended = [], [], None
        if self._parser is not None:
            self.more = self._parsed(self._parser, ids, logprobs, ended)
            self.ended = ended
            return self.take_more(into)
        # After a stop string, the engine's tokens are those that it computed before it read the abort.
        text, count = self._text_of(ids, ended) if self.stop is None else ("", 0)
        self.ids.extend(ids[:count])
        self.ended = ended
        if not count and not text:
            return False
        into.index = self.index
        if text:
            into.text = text
        else:
            into.ClearField("text")
        write_records(into.tokens, ids[:count], logprobs, self._token_bytes)
        return True

    def take_more(self, into: inference_pb2.Tokens) -> bool:
        """Fill in the next message of what `take` took. Returns False if there is none: only a parser makes several."""
        if not self.more:
            return False
        part = self.more.popleft()
        into.index = self.index
        match part.event:
            case Text(text):
                into.text = text
            case Reasoning(text):
                into.reasoning = text
            case CallPart(index, arguments, id, name):
                into.tool_call.Clear()
                into.tool_call.index, into.tool_call.arguments = index, arguments
                into.tool_call.id, into.tool_call.name = id, name
            case None:
                into.ClearField("delta")
        write_records(into.tokens, part.ids, part.logprobs, self._token_bytes)
        return True

    def finished(self) -> inference_pb2.Finished:
        """The `finished` event, once `ended` is set."""
        assert self.ended is not None, "the engine's end comes first"
        ended_itself = FinishReason.FINISH_REASON_STOP
        if self._parser is not None and self._parser.num_calls:
            ended_itself = FinishReason.FINISH_REASON_TOOL_CALLS
        if self.stop is not None:
            return inference_pb2.Finished(index=self.index, reason=ended_itself, stop_string=self.stop or None)
        if self.ended.matched_grammar:
            return inference_pb2.Finished(index=self.index, reason=ended_itself, grammar=True)
        reason = _FINISH_REASONS.get(self.ended.reason, FinishReason.FINISH_REASON_UNSPECIFIED)
        return inference_pb2.Finished(
            index=self.index,
            reason=ended_itself if reason == FinishReason.FINISH_REASON_STOP else reason,
            stop_token_id=self.ended.matched if self.ended.HasField("matched") else None,
        )

    def _parsed(
        self,
        parser: AnswerParser,
        ids: Sequence[int],
        logprobs: Sequence[engine_pb2.Logprobs],
        ended: engine_pb2.Ended | None,
    ) -> deque[Part]:
        parts: deque[Part] = deque()
        for index, id in enumerate(ids):
            if self.stop is not None:
                break
            is_end = ended is not None and index + 1 == len(ids)
            text, count = self._text_of((id,), ended if is_end else None)
            self.ids.extend((id,)[:count])
            was_thinking = parser.is_thinking
            self._events += parser.push(text)
            if parser.has_ended and self.stop is None:
                self.stop = ""
            self.num_reasoning += was_thinking or parser.is_thinking
            if is_end or self.stop is not None:
                self._events += parser.flush()
            event = self._events.popleft() if self._events else None
            _add(parts, Part([id], list(logprobs[index : index + 1]), event))
        if ended is not None and not ids and self.stop is None:
            self._events += parser.push(self._text_of((), ended)[0])
            self._events += parser.flush()
        if ended is not None or self.stop is not None:
            for event in self._events:
                _add(parts, Part([], [], event))
            self._events.clear()
        return parts

    def _text_of(self, ids: Sequence[int], ended: engine_pb2.Ended | None) -> tuple[str, int]:
        """The text that these tokens add, and the number of tokens that count: those up to a stop string, if found."""
        if self._detokenizer is None:
            return "", len(ids)
        # The id that ended the sequence is always reported; the client chooses whether the text includes it.
        num_before_end = len(ids) - bool(ids and ended is not None and ended.HasField("matched"))
        before_end, at_end = ids[:num_before_end], ids[num_before_end:]
        if self._matcher is None:
            text = self._detokenizer.push(before_end)
            return (text + self._text_at_end(at_end) if ended is not None else text), len(ids)
        pieces = []
        for index, id in enumerate(before_end):
            delta = self._detokenizer.push((id,))
            if self.num_tokens + index < self._min_tokens:
                pieces.append(delta)
                continue
            pieces.append(self._matcher.push(delta))
            if self._matcher.matched is not None:
                return self._stopped(pieces, self._matcher.matched), index + 1
        if ended is not None and at_end and self._includes_stop:
            pieces += (self._matcher.flush(), self._text_at_end(at_end))
        elif ended is not None:
            pieces.append(self._matcher.push(self._detokenizer.flush()))
            if self._matcher.matched is not None:
                return self._stopped(pieces, self._matcher.matched), len(ids)
            pieces.append(self._matcher.flush())
        return "".join(pieces), len(ids)

    def _text_at_end(self, ids: Sequence[int]) -> str:
        assert self._detokenizer is not None, "there is text"
        return (self._detokenizer.push(ids) if self._includes_stop else "") + self._detokenizer.flush()

    def _stopped(self, pieces: list[str], stop: str) -> str:
        self.stop = stop
        return "".join((*pieces, stop) if self._includes_stop else pieces)


def _add(parts: deque[Part], part: Part) -> None:
    """Add a part, to the last one if both have one delta together."""
    if parts:
        last = parts[-1]
        events = joined(event for event in (last.event, part.event) if event is not None)
        if len(events) <= 1:
            last.ids += part.ids
            last.logprobs += part.logprobs
            last.event = events[0] if events else None
            return
    parts.append(part)


def write_records(
    records: RepeatedCompositeFieldContainer[inference_pb2.Token],
    ids: Sequence[int],
    logprobs: Sequence[engine_pb2.Logprobs] = (),
    token_bytes: TokenBytes | None = None,
) -> None:
    """Replace the records with those of `ids`. `token_bytes` gives a token's bytes; None leaves them out."""
    if len(ids) == len(records) == 1 and not logprobs and token_bytes is None:  # as in most messages
        records[0].id = ids[0]
        return
    del records[:]
    for id in ids:
        records.add(id=id)
    for record, found in zip(records, logprobs, strict=False):
        write_logprobs(record, found)
    if token_bytes is not None:
        write_bytes(records, token_bytes)


def write_logprobs(record: inference_pb2.Token, found: engine_pb2.Logprobs) -> None:
    record.logprob = found.logprob
    for top_id, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        record.top.add(id=top_id, logprob=logprob)


def write_bytes(records: RepeatedCompositeFieldContainer[inference_pb2.Token], token_bytes: TokenBytes) -> None:
    for record in records:
        record.bytes = token_bytes(record.id)
        for top in record.top:
            top.bytes = token_bytes(top.id)


class ClientWriter:
    """Writes one call's responses, and ends the call if the client stops reading. A context manager around all writes.

    One timer per call watches its writes: a timeout for each write would cost as much as building its message.
    """

    def __init__(self, call: ClientCall, stall_timeout_s: float) -> None:
        self._call = call
        self._stall_timeout_s = stall_timeout_s
        self._write_began = math.inf  # inf: none is under way
        self._timeout = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> ClientWriter:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._stall_timeout_s, self._check)
        return self

    async def write(self, response: inference_pb2.GenerateResponse) -> None:
        """Write a response, which may be reused afterwards."""
        self._write_began = time.monotonic()
        await self._call.write(response)
        self._write_began = math.inf

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise ResourceExhausted if the client has stopped reading."""
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            message = f"the client has read nothing for {self._stall_timeout_s:g} s"
            raise ResourceExhausted(message, reason="READER_STALLED") from None

    def _check(self) -> None:
        """End the call if its write has stalled; otherwise check again at the earliest time at which it could have."""
        now = time.monotonic()
        stalls_at = min(self._write_began, now) + self._stall_timeout_s
        if stalls_at <= now:
            self._timeout.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(stalls_at - now, self._check)
