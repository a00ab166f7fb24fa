"""Sizes that a client chooses, on every protocol: nothing of such a size exists before it is known to be allowed."""

from __future__ import annotations

import http.client
import json
import struct
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_server.router.adapters.protocols import kserve_pb2, vllm_engine_pb2
from tests.servers import Server, running_server

MOST_GROWTH_BYTES = 50 << 20
MOST_S = 0.5  # the promise is 0.1; the machine of a test may be busy
SIZES = (1_000_000, 1_000_000_000, (1 << 31) - 1, (1 << 32) - 1)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--model", "synthetic", "--step-ms", "1", "--http", "127.0.0.1:0") as server:
        yield server


def peak_bytes(server: Server) -> int:
    """The most memory that the router and its engine have ever had, together."""
    found = 0
    for pid in (server.process.pid, server.engine().pid):
        with open(f"/proc/{pid}/status") as status:
            found += next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    return found


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str]:
    address = urlsplit(server.http)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    connection.request("POST", path, json.dumps(body).encode())
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "logprobs": True, "top_logprobs": 5}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/completions", {"prompt": "Hi", "stream": True, "echo": True, "logprobs": 5}),
    ],
)
def test_a_number_of_answers_over_http_costs_nothing(
    server: Server, path: str, body: dict[str, Any], size: int
) -> None:
    before = peak_bytes(server)
    began = time.monotonic()
    status, text = post(server, path, {**body, "n": size})
    assert time.monotonic() - began < MOST_S
    assert status == 400
    assert json.loads(text)["error"]["param"] == "n"
    assert peak_bytes(server) - before < MOST_GROWTH_BYTES


def asking(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt="Hi", **fields)


GRPC: list[tuple[str, Any]] = [
    ("sampling.n", lambda size: asking(sampling={"n": size})),
    ("output.logprobs", lambda size: inference_pb2.GenerateRequest(prompt="Hi", output={"logprobs": size})),
    (
        "output.prompt_logprobs",
        lambda size: inference_pb2.GenerateRequest(prompt="Hi", output={"prompt_logprobs": size}),
    ),
    ("stopping.max_tokens", lambda size: inference_pb2.GenerateRequest(prompt="Hi", stopping={"max_tokens": size})),
    ("stopping.min_tokens", lambda size: inference_pb2.GenerateRequest(prompt="Hi", stopping={"min_tokens": size})),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "made"), GRPC)
def test_a_size_over_grpc_costs_nothing(server: Server, name: str, made: Any, size: int) -> None:
    before = peak_bytes(server)
    began = time.monotonic()
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
        list(inference_pb2_grpc.InferenceStub(channel).Generate(made(size), timeout=60))
    assert time.monotonic() - began < MOST_S
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert name in refused.value.details()
    assert peak_bytes(server) - before < MOST_GROWTH_BYTES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "name", ["n", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens", "truncate_prompt_tokens"]
)
def test_a_size_in_vllms_protocol_costs_nothing(server: Server, name: str, size: int) -> None:
    before = peak_bytes(server)
    params = vllm_engine_pb2.SamplingParams()
    field = params.DESCRIPTOR.fields_by_name[name]
    if field.type == field.TYPE_INT32 and size >= 1 << 31:
        pytest.skip("the field is narrower")
    setattr(params, name, size)
    message = vllm_engine_pb2.GenerateRequest(request_id="a", tokenized={"input_ids": [1, 2]}, sampling_params=params)
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
        list(channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(message.SerializeToString(), timeout=60))
    assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    assert peak_bytes(server) - before < MOST_GROWTH_BYTES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["n", "best_of", "logprobs", "max_tokens"])
def test_a_size_in_kserves_protocol_costs_nothing(server: Server, name: str, size: int) -> None:
    before = peak_bytes(server)
    message = kserve_pb2.ModelInferRequest(model_name="synthetic")
    for tensor, text in (("text_input", b"Hi"), ("sampling_parameters", json.dumps({name: size}).encode())):
        message.inputs.add(name=tensor, datatype="BYTES", shape=[1])
        message.raw_input_contents.append(struct.pack("<I", len(text)) + text)
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message.SerializeToString(), timeout=60)
    assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    assert peak_bytes(server) - before < MOST_GROWTH_BYTES


@pytest.mark.parametrize("shape", [[1_000_000_000], [1 << 40], [1 << 31, 1 << 31], [-1]])
def test_a_tensors_shape_alone_costs_nothing(server: Server, shape: list[int]) -> None:
    before = peak_bytes(server)
    message = kserve_pb2.ModelInferRequest(model_name="synthetic")
    message.inputs.add(name="text_input", datatype="BYTES", shape=shape)
    message.raw_input_contents.append(b"\x02\x00\x00\x00Hi")
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message.SerializeToString(), timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert peak_bytes(server) - before < MOST_GROWTH_BYTES


def test_dimensions_of_an_embedding_cost_nothing(server: Server) -> None:
    before = peak_bytes(server)
    for size in SIZES:
        status, text = post(server, "/v1/embeddings", {"input": "Hi", "dimensions": size})
        assert status == 400
        assert json.loads(text)["error"]["param"] == "dimensions"
    assert peak_bytes(server) - before < MOST_GROWTH_BYTES
