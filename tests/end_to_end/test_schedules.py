"""The way of serving is the server's to choose."""

from __future__ import annotations

import grpc

from protos import inference_pb2_grpc
from tests.end_to_end.asking import ask, request
from tests.servers import running_server


def test_a_sequential_server_ends_one_sequence_before_it_starts_the_next() -> None:
    with (
        running_server("--model", "synthetic", "--step-ms", "5", "--schedule", "sequential") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        message = request("three of these", max_tokens=8, sampling={"n": 3})
        answer = ask(inference_pb2_grpc.InferenceStub(channel), message)
    order = [response.tokens.index for response in answer.responses if response.HasField("tokens")]
    assert set(order) == {0, 1, 2}
    assert order == sorted(order)
