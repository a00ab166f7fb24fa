"""A router's message to an engine."""

from __future__ import annotations

import math

from google.protobuf.message import DecodeError

from pagoda.engine.v1 import engine_pb2
from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.engine.serving.codec import (
    InvalidMessage,
    Rejected,
    check_abort,
    check_submit,
    check_take_trace,
    sequences_from_submit,
)
from pagoda_server.settings.request import MAX_LOGPROBS, MAX_N, MAX_STOP_IDS
from pagoda_server.settings.sampling import PARAMETERS
from tests.fuzz.common import check_line

VOCAB_SIZE, MAX_MODEL_LEN = 100, 48


def check(data: bytes) -> bool:
    try:
        message = engine_pb2.RouterMessage.FromString(data)
        match message.WhichOneof("message"):
            case "submit":
                check_submit(message.submit, VOCAB_SIZE, MAX_MODEL_LEN)
            case "abort":
                check_abort(message.abort)
            case "take_trace":
                check_take_trace(message.take_trace)
            case _:
                return False
    except (DecodeError, InvalidMessage, Rejected) as error:
        check_line(error)
        return False
    if message.HasField("submit"):
        _use(message.submit)
    return True


def _use(submit: engine_pb2.Submit) -> None:
    count = submit.sampling.n or 1
    assert count <= MAX_N
    sequences = sequences_from_submit(submit, range(count), now=1.0, vocab_size=VOCAB_SIZE)
    assert len(sequences) == count
    assert len({seq.params.seed for seq in sequences}) == count
    for seq in sequences:
        _check_sequence(seq)


def _check_sequence(seq: Sequence) -> None:
    params, request = seq.params, seq.request
    assert 0 < request.prompt_len <= len(seq.tokens) < MAX_MODEL_LEN
    assert all(0 <= id < VOCAB_SIZE for id in (*seq.tokens, *params.stop_token_ids, *dict(params.logit_bias)))
    assert all(getattr(params, each.name) in each.interval for each in PARAMETERS)
    assert all(math.isfinite(bias) for _, bias in params.logit_bias)
    assert params.max_tokens > 0
    assert params.min_tokens <= params.max_tokens
    assert params.logprobs is None or params.logprobs <= MAX_LOGPROBS
    assert len(params.stop_token_ids) <= 2 * MAX_STOP_IDS
    assert not any(math.isnan(time) for time in (request.deadline, request.age_s, request.ttft_s, request.tpot_s))
    assert min(request.ttft_s, request.tpot_s) > 0
    if seq.token_mask is not None:
        words = memoryview(bytearray(4 * -(-VOCAB_SIZE // 32))).cast("I")
        seq.token_mask.fill(seq.tokens, words)
        assert any(words)
