"""Bad input: the status, the field that it names, and no effect on other requests."""

from __future__ import annotations

import math
import threading
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import ask, request

Request = inference_pb2.GenerateRequest
CHAT: dict[str, Any] = {"messages": [{"role": "ROLE_USER", "content": "Hi"}]}
DEEP: Any = None
for _ in range(20):
    DEEP = [DEEP]
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no input", {"prompt": None}, "input"),
    ("an empty prompt", {"prompt": ""}, "prompt"),
    ("an empty message", {"message": ""}, "message"),
    ("a prompt over the byte cap", {"prompt": "x" * ((1 << 20) + 1)}, "prompt"),
    ("a message over the byte cap", {"message": "x" * ((1 << 20) + 1)}, "message"),
    ("a prompt over the context", {"prompt": "x" * 40_000}, "prompt"),
    ("a message over the context", {"message": "x" * 40_000}, "message"),
    (
        "prompt and output over the context",
        {"prompt": "x" * 100, "stopping": {"max_tokens": 32_700}},
        "stopping.max_tokens",
    ),
    ("token id out of range", {"token_ids": {"ids": [1, 258]}}, "token_ids.ids[1]"),
    ("no token ids", {"token_ids": {"ids": []}}, "token_ids.ids"),
    ("a million token ids", {"token_ids": {"ids": [1] * 1_000_000}}, "token_ids.ids"),
    ("NaN temperature", {"sampling": {"temperature": math.nan}}, "sampling.temperature"),
    ("infinite temperature", {"sampling": {"temperature": math.inf}}, "sampling.temperature"),
    ("top_p zero", {"sampling": {"top_p": 0.0}}, "sampling.top_p"),
    ("min_p over one", {"sampling": {"min_p": 1.5}}, "sampling.min_p"),
    ("repetition penalty zero", {"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
    ("presence penalty too large", {"sampling": {"presence_penalty": 11.0}}, "sampling.presence_penalty"),
    ("NaN frequency penalty", {"sampling": {"frequency_penalty": math.nan}}, "sampling.frequency_penalty"),
    ("bias for no token", {"sampling": {"logit_bias": {999: 1.0}}}, "sampling.logit_bias[999]"),
    ("infinite bias", {"sampling": {"logit_bias": {1: math.inf}}}, "sampling.logit_bias[1]"),
    (
        "allowing no such token",
        {"sampling": {"allowed_token_ids": [258]}},
        "sampling.allowed_token_ids[0]",
    ),
    ("n zero", {"sampling": {"n": 0}}, "sampling.n"),
    ("n a million", {"sampling": {"n": 1_000_000}}, "sampling.n"),
    ("a beam search", {"sampling": {"beam_search": {"width": 2}}}, "sampling.beam_search"),
    ("max_tokens zero", {"stopping": {"max_tokens": 0}}, "stopping.max_tokens"),
    ("min over max", {"stopping": {"max_tokens": 4, "min_tokens": 5}}, "stopping.min_tokens"),
    ("empty stop string", {"stopping": {"stop": ["fine", ""]}}, "stopping.stop[1]"),
    ("too many stop strings", {"stopping": {"stop": ["x"] * 17}}, "stopping.stop"),
    ("too long a stop string", {"stopping": {"stop": ["x" * 257]}}, "stopping.stop[0]"),
    ("stop id out of range", {"stopping": {"stop_token_ids": [70_000]}}, "stopping.stop_token_ids[0]"),
    ("stop strings without text", {"stopping": {"stop": ["x"]}, "output": {"text": False}}, "stopping.stop"),
    ("too many logprobs", {"output": {"logprobs": 21}}, "output.logprobs"),
    ("priority out of range", {"priority": 5000}, "priority"),
    ("request id too long", {"request_id": "x" * 129}, "request_id"),
    ("request id with control characters", {"request_id": "a\nb"}, "request_id"),
    ("a tool without a name", {"chat": {**CHAT, "tools": [{}]}}, "chat.tools[0].name"),
    ("too many tools", {"chat": {**CHAT, "tools": [{"name": "f"}] * 129}}, "chat.tools"),
    (
        "a tool that takes no JSON",
        {"chat": {**CHAT, "tools": [{"name": "f", "parameters": "{"}]}},
        "chat.tools[0].parameters",
    ),
    (
        "a variable that the server sets",
        {"chat": {**CHAT, "template_kwargs": {"messages": 1}}},
        "chat.template_kwargs.messages",
    ),
    ("too deep a variable", {"chat": {**CHAT, "template_kwargs": {"a": DEEP}}}, "chat.template_kwargs"),
    ("an empty chat", {"chat": {"messages": []}}, "chat.messages"),
    ("an unknown role", {"chat": {"messages": [{"role": 9, "content": "x"}]}}, "chat.messages[0].role"),
    ("salt too long", {"cache": {"salt": "x" * 129}}, "cache.salt"),
]


def asked(fields: dict[str, Any]) -> inference_pb2.GenerateRequest:
    has_input = fields.keys() & {"prompt", "message", "chat", "token_ids"}
    return Request(**fields if has_input else {"prompt": "fine", **fields})


@pytest.mark.parametrize(("fields", "field"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_field_is_named(inference: inference_pb2_grpc.InferenceStub, fields: dict[str, Any], field: str) -> None:
    message = asked(fields)
    with pytest.raises(grpc.RpcError) as caught:
        list(inference.Generate(message, timeout=120))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert bad_request.field_violations[0].field == field
    assert len(caught.value.details()) < 300
    assert "Traceback" not in caught.value.details()


def test_a_message_over_the_size_limit_is_resource_exhausted(inference: inference_pb2_grpc.InferenceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(inference.Generate(Request(prompt="x" * (17 << 20)), timeout=120))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_unknown_model_is_not_found(inference: inference_pb2_grpc.InferenceStub) -> None:
    for call in (
        lambda: list(inference.Generate(Request(prompt="x", model="another"))),
        lambda: inference.Tokenize(inference_pb2.TokenizeRequest(prompt="x", model="another")),
        lambda: inference.Detokenize(inference_pb2.DetokenizeRequest(model="another")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert caught.value.details() == "model: not served here; the served model is synthetic"


def test_a_very_small_temperature_succeeds(inference: inference_pb2_grpc.InferenceStub) -> None:
    assert len(ask(inference, request("cold", max_tokens=3, sampling={"temperature": 1e-10})).ids()) == 3


def test_a_hail_of_bad_requests_disturbs_no_stream(inference: inference_pb2_grpc.InferenceStub) -> None:
    def misbehave() -> None:
        for _, fields, _ in BAD * 3:
            with pytest.raises(grpc.RpcError):
                list(inference.Generate(asked(fields), timeout=120))

    hail = [threading.Thread(target=misbehave) for _ in range(2)]
    for thread in hail:
        thread.start()
    answer = ask(inference, request("steady", max_tokens=500))
    for thread in hail:
        thread.join()
    assert answer.ids() == expected_tokens(b"steady", 500, 258)
