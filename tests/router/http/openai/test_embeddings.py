"""Embeddings of the OpenAI API: which bodies become which requests, by which names others are refused, the answer."""

from __future__ import annotations

import base64
import json
import struct
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf import json_format

from pagoda.v1 import inference_pb2
from pagoda_server.router.errors import InvalidArgument
from pagoda_server.router.http.http_call import HttpCall
from pagoda_server.router.http.openai.embeddings import EmbeddingsApi
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.readout_validation import validate_embed
from tests.router.fleets import fleet_of, one_model

LIMITS = Limits(max_model_len=4096, vocab_size=1000, kv_token_capacity=1 << 20, hidden_size=8)


def request(**fields: Any) -> tuple[inference_pb2.EmbedRequest, EmbeddingsApi]:
    api = EmbeddingsApi(one_model(fleet_of(), limits=LIMITS))
    call = cast("HttpCall", SimpleNamespace(request_id="r"))
    return api.request(json.dumps({"input": "Hi"} | fields).encode(), LIMITS, call), api


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("Hi", [{"text": "Hi"}]),
        (["a", "b"], [{"text": "a"}, {"text": "b"}]),
        ([1, 2], [{"token_ids": {"ids": [1, 2]}}]),
        ([[1], [2, 3]], [{"token_ids": {"ids": [1]}}, {"token_ids": {"ids": [2, 3]}}]),
        (["a", [1]], [{"text": "a"}, {"token_ids": {"ids": [1]}}]),
    ],
)
def test_an_input_is_a_text_token_ids_or_a_list_of_these(given: Any, inputs: list[Any]) -> None:
    found, _ = request(input=given)
    assert json_format.MessageToDict(found, preserving_proto_field_name=True) == {
        "request_id": "r", "inputs": inputs, "cache": {},
    }  # fmt: skip


def test_every_field_arrives() -> None:
    found, _ = request(
        model="m", dimensions=3, encoding_format="base64", user="u", pooling="mean", normalize=False, cache_salt="s",
        priority=-2, what=None,
    )  # fmt: skip
    assert json_format.MessageToDict(found, preserving_proto_field_name=True) == {
        "request_id": "r", "model": "m", "inputs": [{"text": "Hi"}], "dimensions": 3, "pooling": "POOLING_MEAN",
        "normalize": False, "cache": {"salt": "s"}, "priority": -2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"input": None}, "input: is missing"),
        ({"input": 5}, "input: must be a string, a list of token ids, or a list of these"),
        ({"input": ["a"] * 257}, "input: has more than 256 entries"),
        ({"input": [1] * 4096}, "input: has more than 4095 entries"),
        ({"input": ["a", {}]}, "input[1]: must be a string or a list of token ids"),
        ({"input": [1, "a"]}, "input[1]: must be a whole number"),
        ({"input": [[1], [2, -1]]}, "input[1][1]: is -1, must be from 0"),
        ({"encoding_format": "int8"}, "encoding_format: must be one of float, base64"),
        ({"pooling": "max"}, "pooling: must be one of last, mean, cls"),
        ({"normalize": "no"}, "normalize: must be true or false"),
        ({"dimensions": "3"}, "dimensions: must be a whole number"),
        ({"stream": True}, "stream: is not a field that this server knows"),
        ({"input": "\ud800"}, "body: holds half of a surrogate pair"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        request(**fields)
    assert refused.value.message.startswith(told)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", "b", "c", ""]}, "input[3]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [5, 1000]}, "input[1]"),
        ({"input": ["a", [5, 1000]]}, "input[1][1]"),
        ({"dimensions": 9}, "dimensions"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
    ],
)
def test_what_validation_refuses_has_the_clients_own_name(fields: dict[str, Any], name: str) -> None:
    found, api = request(**fields)
    with pytest.raises(InvalidArgument) as refused:
        validate_embed(found, LIMITS)
    assert api.own_name(refused.value.field) == name


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_the_answer_has_a_vector_for_each_input(encoding: str | None) -> None:
    _, api = request(encoding_format=encoding)
    response = inference_pb2.EmbedResponse(usage=inference_pb2.Usage(prompt_tokens=7))
    for values in ([0.5, -1.25], [3.0, 0.0]):
        response.embeddings.add(values=values)
    assert api.answer().take(response) == b""
    answer = json.loads(api.answer().end())
    vectors = [each.pop("embedding") for each in answer["data"]]
    if encoding == "base64":
        vectors = [list(struct.unpack("<2f", base64.b64decode(each))) for each in vectors]
    assert vectors == [[0.5, -1.25], [3.0, 0.0]]
    assert answer == {
        "object": "list", "data": [{"object": "embedding", "index": 0}, {"object": "embedding", "index": 1}],
        "model": "m", "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }  # fmt: skip
