"""Entries are counted on the wire as the parser would count them, at a cost that the limits bound."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message

from pagoda.v1.inference_pb2 import DetokenizeRequest, EmbedRequest, GenerateRequest, ScoreRequest
from pagoda_server.router.errors import InvalidArgument
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.readout_validation import validate_embed, validate_score
from pagoda_server.router.request.validation import validate_detokenize, validate_generate
from pagoda_server.router.request.wire import MAX_FIELDS, Malformed, check_entries, most_entries

LIMITS = Limits(max_model_len=2048, vocab_size=1000, kv_token_capacity=8192)
MOST = most_entries(LIMITS)
USER = {"role": 2, "content": "Hi"}
TOO_MANY: dict[str, dict[str, Any]] = {
    "token_ids.ids": {"token_ids": {"ids": [900] * 2048}},
    "sampling.allowed_token_ids": {"prompt": "x", "sampling": {"allowed_token_ids": [1] * 1001}},
    "sampling.bad_words": {"prompt": "x", "sampling": {"bad_words": ["a"] * 65}},
    "sampling.logit_bias": {"prompt": "x", "sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}},
    "stopping.stop": {"prompt": "x", "stopping": {"stop": ["x"] * 17}},
    "stopping.stop_token_ids": {"prompt": "x", "stopping": {"stop_token_ids": [999] * 65}},
    "chat.messages": {"chat": {"messages": [{}] * 4097}},
    "chat.tools": {"chat": {"messages": [USER], "tools": [{"name": "f"}] * 129}},
    "chat.messages[1].parts": {"chat": {"messages": [USER, {"role": 2, "parts": [{"text": "x"}] * 257}]}},
    "chat.messages[2].tool_calls": {
        "chat": {"messages": [USER, USER, {"role": 3, "tool_calls": [{"name": "f"}] * 129}]}
    },
}


def scan(request: Message) -> None:
    check_entries(request.SerializeToString(), request.DESCRIPTOR, MOST)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", TOO_MANY)
def test_a_list_over_its_limit_is_refused_in_the_words_of_validation(field: str) -> None:
    request = GenerateRequest(**TOO_MANY[field])
    with pytest.raises(InvalidArgument) as scanned:
        scan(request)
    with pytest.raises(InvalidArgument) as validated:
        validate_generate(request, LIMITS)
    assert scanned.value.field == field
    assert scanned.value.message == validated.value.message


def test_ids_to_detokenize_are_counted_packed_and_one_by_one() -> None:
    request = DetokenizeRequest(token_ids=[900] * 2049)
    with pytest.raises(InvalidArgument) as scanned:
        scan(request)
    with pytest.raises(InvalidArgument) as validated:
        validate_detokenize(request, LIMITS)
    assert scanned.value.message == validated.value.message
    one_by_one = b"\x10\x84\x07" * 2049
    with pytest.raises(InvalidArgument, match="more than 2048"):
        check_entries(one_by_one, DetokenizeRequest.DESCRIPTOR, MOST)
    check_entries(one_by_one[3:], DetokenizeRequest.DESCRIPTOR, MOST)


def test_inputs_and_continuations_are_counted() -> None:
    for request, validate in (
        (EmbedRequest(inputs=[{"text": "x"}] * 257), validate_embed),
        (ScoreRequest(prompt="x", continuations=[{"text": "x"}] * 257), validate_score),
    ):
        with pytest.raises(InvalidArgument) as scanned:
            scan(request)
        with pytest.raises(InvalidArgument) as validated:
            validate(request, LIMITS)  # type: ignore[arg-type]
        assert scanned.value.message == validated.value.message


def test_what_just_fits_passes() -> None:
    messages = [{"role": 2, "parts": [{"text": "x"}] * 256}] * 4 + [USER] * 4092
    scan(GenerateRequest(chat={"messages": messages, "tools": [{"name": "f"}] * 128}))
    scan(GenerateRequest(token_ids={"ids": [900] * 2047}, stopping={"stop": ["x"] * 16}))


def test_a_message_in_pieces_counts_as_one() -> None:
    pieces = GenerateRequest(stopping={"stop": ["x"]}).SerializeToString() * 17
    with pytest.raises(InvalidArgument, match=r"stopping\.stop: has more than 16"):
        check_entries(pieces, GenerateRequest.DESCRIPTOR, MOST)
    check_entries(pieces[: len(pieces) // 17 * 16], GenerateRequest.DESCRIPTOR, MOST)


def test_what_is_inside_a_group_is_no_field_of_the_request() -> None:
    """The parser keeps a group as unknown bytes, whatever the numbers in it mean outside."""
    group = bytes([0x7B]) + b"%s" + bytes([0x7C])
    stops = GenerateRequest(stopping={"stop": ["x"] * 17}).SerializeToString()
    broken = GenerateRequest(stopping={"stop": ["x"]}).SerializeToString().replace(b"\x0a\x01x", b"\x0a\x09x")
    for inside in (stops, broken, group % stops):
        assert not GenerateRequest.FromString(group % inside).HasField("stopping")
        check_entries(group % inside, GenerateRequest.DESCRIPTOR, MOST)
    for unbalanced in (group[:1], group[-1:], group % group[:1]):
        with pytest.raises(DecodeError):
            GenerateRequest.FromString(unbalanced)
        with pytest.raises(Malformed):
            check_entries(unbalanced, GenerateRequest.DESCRIPTOR, MOST)


@pytest.mark.parametrize(
    "raw",
    [b"\xf8\x07\x00" * 500_000, b"\x3a\x00" * 700_000, b"\x2a\x04\x2a\x02\x0a\x00" * 200_000],
    ids=["unknown fields", "a message in pieces", "template_kwargs"],
)
def test_a_message_of_too_many_fields_costs_no_more_than_the_limit(raw: bytes) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidArgument, match=f"request: has more than {MAX_FIELDS} fields, the limit"):
        check_entries(raw, GenerateRequest.DESCRIPTOR, MOST)
    assert time.thread_time() - started < 1.0


def test_bytes_that_the_parser_takes_are_never_called_malformed() -> None:
    """Random bytes and requests with changed bytes: whatever the parser takes, the scan walks to its end."""
    chance = random.Random(1)
    seeds = [GenerateRequest(**fields).SerializeToString() for fields in TOO_MANY.values()]
    num_taken = 0
    for _ in range(4000):
        raw = bytearray(chance.choice(seeds)[: chance.randrange(1, 200)])
        for _ in range(chance.randrange(4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        try:
            GenerateRequest.FromString(bytes(raw))
        except DecodeError:
            continue
        num_taken += 1
        try:
            check_entries(bytes(raw), GenerateRequest.DESCRIPTOR, MOST)
        except InvalidArgument:
            pass
        except Malformed:
            pytest.fail(f"{bytes(raw)!r}")
    assert num_taken > 100
