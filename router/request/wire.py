"""Count the entries of a serialized request before any object is made of them.

Two bytes on the wire can become an object of a hundred. The scan walks the fields of the request and of the messages
inside it, creates nothing but counters, and stops at the first count over its limit. MAX_FIELDS bounds all fields
together, so it bounds the scan as well as the parser's work after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from ...settings.request import MAX_CHOICES
from ..errors import InvalidArgument
from .fields import Limits, too_many

MAX_FIELDS = 65_536  # of a request and of the messages inside it; a packed list is one field

_VARINT, _FIXED64, _BYTES, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_CONTINUED = bytes(range(128, 256))  # bytes of a varint that are not its last
_PACKABLE = (
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_BOOL,
    FieldDescriptor.TYPE_ENUM,
)


def most_entries(limits: Limits) -> Mapping[str, int]:
    """Limits of repeated fields, by full name. Validation checks them too: small requests are not scanned."""
    return {
        "pagoda.v1.TokenIds.ids": limits.max_model_len - 1,
        "pagoda.v1.Sampling.logit_bias": limits.max_logit_bias,
        "pagoda.v1.Sampling.allowed_token_ids": limits.vocab_size,
        "pagoda.v1.Sampling.bad_words": limits.max_bad_words,
        "pagoda.v1.Choice.options": MAX_CHOICES,
        "pagoda.v1.Stopping.stop": limits.max_stop,
        "pagoda.v1.Stopping.stop_token_ids": limits.max_stop_ids,
        "pagoda.v1.Chat.messages": limits.max_messages,
        "pagoda.v1.Chat.tools": limits.max_tools,
        "pagoda.v1.ChatMessage.parts": limits.max_parts,
        "pagoda.v1.ChatMessage.tool_calls": limits.max_tools,
        "pagoda.v1.DetokenizeRequest.token_ids": limits.max_model_len,
        "pagoda.v1.EmbedRequest.inputs": limits.max_readouts,
        "pagoda.v1.ScoreRequest.continuations": limits.max_readouts,
    }


class Malformed(Exception):
    """The bytes are not a serialized message."""


def check_entries(raw: bytes, descriptor: Descriptor, most: Mapping[str, int]) -> None:
    """Raise InvalidArgument if a list in a serialized request has more entries than its limit, else Malformed.

    most  the limits, by full name of the field
    """
    _Scan(raw, most).run(descriptor)


class _Field(NamedTuple):
    name: str
    full_name: str
    is_repeated: bool
    is_packable: bool
    message: Descriptor | None


@cache
def _fields(descriptor: Descriptor) -> dict[int, _Field]:
    return {
        field.number: _Field(
            field.name, field.full_name, field.is_repeated, field.type in _PACKABLE, field.message_type
        )
        for field in descriptor.fields
    }


class _Message:
    """One message as the parser will build it: it merges the occurrences of a field that is not repeated."""

    __slots__ = ("counts", "fields", "parts", "path")

    def __init__(self, descriptor: Descriptor, path: str) -> None:
        self.path = path
        self.fields = _fields(descriptor)
        self.counts: dict[int, int] = {}  # entries of its repeated fields, by number
        self.parts: dict[int, _Message] = {}  # its messages that are not repeated, by number


class _Scan:
    def __init__(self, raw: bytes, most: Mapping[str, int]) -> None:
        self._raw = raw
        self._most = most

    def run(self, descriptor: Descriptor) -> None:
        raw = self._raw
        message, offset, end = _Message(descriptor, ""), 0, len(raw)
        outer: list[tuple[_Message, int]] = []  # messages that go on after this one, and their ends
        num_fields = groups = 0  # groups that are open: the protocol has none, so nothing inside is a field of ours
        while True:
            if offset >= end:
                if offset > end or groups:
                    raise Malformed
                if not outer:
                    return
                message, end = outer.pop()
                continue
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise InvalidArgument("request", f"has more than {MAX_FIELDS} fields, the limit")
            tag = raw[offset]
            offset += 1
            if tag > 127:
                tag, offset = self._varint(offset - 1)
            kind, number = tag & 7, tag >> 3
            field = None if groups else message.fields.get(number)
            if kind == _BYTES:
                if offset >= end:
                    raise Malformed
                length = raw[offset]
                offset += 1
                if length > 127:
                    length, offset = self._varint(offset - 1)
                if offset + length > end:
                    raise Malformed
                if field is None:
                    offset += length
                    continue
                if field.is_packable and field.is_repeated:
                    self._count(message, number, len(raw[offset : offset + length].translate(None, _CONTINUED)))
                elif field.is_repeated:
                    self._count(message, number, 1)
                if field.message is None:
                    offset += length
                else:
                    outer.append((message, end))
                    message, end = self._inside(message, number, field), offset + length
            elif kind == _VARINT:
                if field is not None and field.is_packable and field.is_repeated:
                    self._count(message, number, 1)
                _, offset = self._varint(offset)
            elif kind == _FIXED32:
                offset += 4
            elif kind == _FIXED64:
                offset += 8
            elif kind == _START_GROUP:
                groups += 1
            elif kind == _END_GROUP and groups:
                groups -= 1
            else:
                raise Malformed

    def _count(self, message: _Message, number: int, entries: int) -> None:
        count = message.counts[number] = message.counts.get(number, 0) + entries
        field = message.fields[number]
        most = self._most.get(field.full_name)
        if most is not None and count > most:
            raise too_many(message.path + field.name, most)

    def _inside(self, message: _Message, number: int, field: _Field) -> _Message:
        assert field.message is not None
        if field.is_repeated:
            return _Message(field.message, f"{message.path}{field.name}[{message.counts[number] - 1}].")
        if (part := message.parts.get(number)) is None:
            part = message.parts[number] = _Message(field.message, f"{message.path}{field.name}.")
        return part

    def _varint(self, offset: int) -> tuple[int, int]:
        """The varint at `offset`, and where it ends."""
        raw, value = self._raw, 0
        for shift in range(0, 70, 7):
            if offset >= len(raw):
                raise Malformed
            byte = raw[offset]
            offset += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, offset
        raise Malformed
