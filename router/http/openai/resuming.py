"""Streamed answers that can be resumed: each event has an id, which says what its client has when it has the event.

A client that lost its connection repeats its request with the header Last-Event-ID. The id is enough to send what is
missing: the kept stream comes again from the tokens that the client has, and events that it has are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.v1 import inference_pb2

from ...errors import InvalidArgument
from .answers import DONE, StreamedAnswer
from .requests import Asked

LAST_EVENT_ID = "last-event-id"
_PLACE = r"[0-9]{1,9}\.[0-9]{1,9}(?:\.[0-9]{1,9}\.(?:[0-9a-f]{2}){0,3})?"
_ID = re.compile(rf"([0-9]{{1,10}}):({_PLACE}(?:,{_PLACE})*):(\S+)")
_END = b"\n\n"


class Place(NamedTuple):
    """A place in one sequence's events, of which the later one is greater.

    num_tokens  the tokens up to here
    num_others  the events behind these tokens, which have none: a chat's role at the start; text, the reason and the
                usage at the end
    """

    num_tokens: int
    num_others: int


_ROLE = Place(0, 1)


@dataclass(frozen=True, slots=True)
class EventId:
    """What a client has.

    created  seconds since 1970, when the request came
    places   of each sequence the last event
    offsets  of each sequence of a completion with log-probabilities, what its text offsets go on from; None: nothing
    """

    created: int
    places: Sequence[Place]
    offsets: Sequence[tuple[int, bytes] | None]
    request_id: str

    @classmethod
    def read(cls, text: str) -> EventId:
        """Raises InvalidArgument."""
        if (found := _ID.fullmatch(text)) is None:
            raise InvalidArgument(LAST_EVENT_ID, "is not the id of an event of this server")
        created, places, request_id = found.groups()
        parts = [each.split(".") for each in places.split(",")]
        return cls(
            int(created),
            [Place(int(part[0]), int(part[1])) for part in parts],
            [(int(part[2]), bytes.fromhex(part[3])) if len(part) > 2 else None for part in parts],
            unquote(request_id),
        )

    def resume_request(self, asked: Asked) -> inference_pb2.ResumeRequest:
        """What continues the stream, for a client that asks for the same once more. Raises InvalidArgument."""
        if not asked.is_resumable:
            raise InvalidArgument("resumable", "must be true, as it was when the stream began")
        if (count := len(self.places)) != asked.n:
            raise InvalidArgument(LAST_EVENT_ID, f"is of {count} sequences, the request has n = {asked.n}")
        counts = [place.num_tokens for place in self.places]
        return inference_pb2.ResumeRequest(request_id=self.request_id, received=counts)


class ByLastEventId:
    """An application of two: one for requests that have the id of an event, and one for those that begin a stream."""

    def __init__(self, begun: ASGIApp, resumed: ASGIApp) -> None:
        self._begun = begun
        self._resumed = resumed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_id = any(name == LAST_EVENT_ID.encode() and value for name, value in scope["headers"])
        await (self._resumed if has_id else self._begun)(scope, receive, send)


class ResumableAnswer(StreamedAnswer):
    """A streamed answer whose events have ids.

    received  what the client has; None: nothing
    """

    def __init__(self, asked: Asked, request_id: str, model: str, received: EventId | None = None) -> None:
        super().__init__(asked, request_id, model)
        self._start = Place(0, 1 if asked.is_chat else 0)  # the role comes before all else, whenever it is sent
        self._received = [Place(0, 0)] * asked.n if received is None else received.places
        self._here = [Place(each.num_tokens, 0) if each.num_tokens else self._start for each in self._received]
        for index, offset in enumerate(received.offsets if received else ()):
            if self._logprobs is not None and offset is not None:
                self._logprobs[index].offset = offset
        self._sent = [self._text_of(index, place) for index, place in enumerate(self._received)]
        self._before_places, self._after_places = f"id: {asked.created}:", f":{quote(request_id, safe='')}\n"
        self._last_index = 0

    def take(self, message: inference_pb2.GenerateResponse, prompt: int = 0) -> bytes:
        part = message.finished if message.HasField("finished") else message.tokens
        if (index := part.index) >= len(self._here):
            raise InvalidArgument(LAST_EVENT_ID, "is of a request with more sequences")
        self._pass(index, len(message.tokens.tokens))
        self._last_index = index
        return self._lacking(index, super().take(message, prompt).split(_END)[:-1])

    def end(self) -> bytes:
        events = super().end().removesuffix(DONE).split(_END)[:-1]
        usage = events.pop() if self._has_usage else b""
        rest = self._lacking(self._last_index, events)
        if usage:
            self._pass(0, 0)  # any sequence would do: it comes when all have ended
            rest += self._lacking(0, [usage])
        return rest + DONE

    def _pass(self, index: int, num_tokens: int) -> None:
        """Go on by one event with so many tokens."""
        before, others = self._here[index]
        self._here[index] = Place(before + num_tokens, 0) if num_tokens else Place(before, others + 1)

    def _lacking(self, index: int, events: Sequence[bytes]) -> bytes:
        """Those of the events that the client lacks, with their ids: one, or a chat's role and one."""
        found = []
        for place, event in zip((_ROLE, self._here[index])[-len(events) :], events, strict=False):
            if place > self._received[index]:
                self._sent[index] = self._text_of(index, place)
                found.append(f"{self._before_places}{','.join(self._sent)}{self._after_places}".encode() + event + _END)
        return b"".join(found)

    def _text_of(self, index: int, place: Place) -> str:
        text = f"{place.num_tokens}.{place.num_others}"
        if self._logprobs is None or (offset := self._logprobs[index].offset) is None:
            return text
        return f"{text}.{offset[0]}.{offset[1].hex()}"
