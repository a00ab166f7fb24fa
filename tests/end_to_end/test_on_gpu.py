"""A whole server on a GPU. Run by `make test-gpu`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from bench.gpu.random_model import write_model
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.checkpoints import DEFAULT_MODEL, CheckpointError, resolve
from pagoda_server.kernels.triton.inputs import ModelShape
from tests.end_to_end.asking import ask, request
from tests.servers import running_server

pytestmark = pytest.mark.gpu


SMALL = ModelShape("small", 4, 8, 2, 64, 256, 512, 300)


def test_requests_at_once_get_the_tokens_that_each_gets_alone(tmp_path: Path) -> None:
    """A model that needs no download: random weights in float32, where batches do not change the likeliest token."""
    write_model(tmp_path, SMALL, max_positions=512)
    requests = [request(f"{at} is a number, and " * (1 + at % 7), 12 + at % 20) for at in range(24)]
    options = ("--device", "cuda", "--dtype", "float32", "--kv-cache-gb", "0.05", "--max-num-seqs", "12")
    with (
        running_server("--model", str(tmp_path), *options) as server,
        grpc.insecure_channel(server.address) as channel,
        ThreadPoolExecutor(24) as threads,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)
        alone = [[token.id for token in ask(inference, one).tokens()] for one in requests]
        together = [
            [token.id for token in answer.tokens()] for answer in threads.map(lambda one: ask(inference, one), requests)
        ]
    assert [len(tokens) for tokens in alone] == [12 + at % 20 for at in range(24)]
    assert together == alone


@pytest.fixture
def _default_model_is_here() -> None:
    try:
        resolve(DEFAULT_MODEL)
    except CheckpointError as error:
        pytest.skip(f"the default model is not here and cannot be fetched: {error}")


@pytest.mark.usefixtures("_default_model_is_here")
def test_the_default_model_answers_on_the_gpu_and_each_stream_gets_its_own_answer() -> None:
    def request(question: str) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(message=question, sampling={"temperature": 0}, stopping={"max_tokens": 24})

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
    assert info.engines[0].info.kernel_backend == "triton"
