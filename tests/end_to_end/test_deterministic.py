"""--deterministic through real processes: a stream has the same log-probabilities alone and in company."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from pagoda.v1 import control_pb2_grpc, inference_pb2_grpc
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.kernels import has_native
from tests.checkpoints.tiny_gguf import tiny_model
from tests.end_to_end.asking import ask, engine_load, request
from tests.servers import Server, running_server

PROMPT = "In a village by the sea there lived a clockmaker with seven clocks. " * 2
COUNT = 60
NUM_OTHERS = 16

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_native(), reason="needs compiled code")]

Stream = list[tuple[int, float, list[tuple[int, float]]]]


def stream(inference: inference_pb2_grpc.InferenceStub) -> Stream:
    """The tokens of one request with their log-probabilities, and those of the most likely ones."""
    message = request(PROMPT, COUNT, sampling={"temperature": 0.8, "top_p": 0.95, "seed": 5})
    message.output.logprobs = 5
    tokens = ask(inference, message).tokens()
    return [(token.id, token.logprob, [(top.id, top.logprob) for top in token.top]) for token in tokens]


def in_company(inference: inference_pb2_grpc.InferenceStub) -> Stream:
    others = [
        request(f"Request {at} of the others" + " and so on" * (at % 9), 2 * COUNT, sampling={"temperature": 1.0})
        for at in range(NUM_OTHERS)
    ]
    with ThreadPoolExecutor(NUM_OTHERS) as threads:
        answers = [threads.submit(ask, inference, other) for other in others]
        found = stream(inference)
        for answer in answers:
            answer.result()
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model in float32, where every bit shows. What runs cuts prompts, and the cache is too small for all."""
    folder = tmp_path_factory.mktemp("model")
    tiny = tiny_model("llama")
    with torch.no_grad():
        for parameter in tiny.model.parameters():
            parameter.mul_(6)  # so that the last bits of a layer do not vanish in the next
    import_gguf(tiny.write(folder / "model.gguf"), folder, no_progress)
    how = ("--dtype", "float32", "--threads", "2", "--max-num-seqs", "18", "--token-budget", "22")
    memory = ("--kv-cache-gb", "0.0008", "--host-kv-gb", "0.0003")
    with running_server("--model", str(folder), "--deterministic", *how, *memory) as server:
        yield server


def test_a_stream_has_the_same_logprobs_alone_and_amid_others(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        company = in_company(inference)
        assert engine_load(control_pb2_grpc.ControlStub(channel)).preemptions > 0
        assert len(company) == COUNT
        assert stream(inference) == company
        assert in_company(inference) == company
