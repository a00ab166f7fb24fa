"""A whole server on a GPU. Run by `make test-gpu`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from protos import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.end_to_end.asking import ask
from tests.servers import running_server

pytestmark = pytest.mark.gpu


def test_the_default_model_answers_on_the_gpu_and_each_stream_gets_its_own_answer() -> None:
    def request(question: str) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(text=question, stopping=inference_pb2.Stopping(max_tokens=24))

    questions = ["What is the capital of Sweden?", "What is the capital of France?"] * 16
    with (
        running_server("--device", "cuda", "--kv-cache-gb", "2", "--max-num-seqs", "32") as server,
        grpc.insecure_channel(server.address) as channel,
        ThreadPoolExecutor(32) as threads,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)
        answers = list(threads.map(lambda question: ask(inference, request(question)).text(), questions))
        info = control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())
    assert all(("Stockholm" if at % 2 == 0 else "Paris") in answer for at, answer in enumerate(answers))
    assert info.engine.kernel_backend == "triton"
