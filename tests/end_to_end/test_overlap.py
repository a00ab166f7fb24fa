"""A server that launches each step before it has read the previous one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from pagoda.v1 import control_pb2_grpc, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import ask, engine_load, request
from tests.servers import running_server

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("host_kv_gb", ["0", "4e-6"])
def test_streams_of_a_server_that_launches_steps_ahead_get_their_own_tokens(host_kv_gb: str) -> None:
    texts = [f"stream {at} " * (1 + at % 5) for at in range(24)]
    arguments = ("--model", "synthetic", "--step-ms", "5,0,0.1", "--overlap", "on", "--kv-cache-gb", "1.6e-6")
    with (
        running_server(*arguments, "--host-kv-gb", host_kv_gb) as server,
        grpc.insecure_channel(server.address) as channel,
        ThreadPoolExecutor(24) as threads,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)
        answers = list(threads.map(lambda text: ask(inference, request(text, max_tokens=30)), texts))
        load = engine_load(control_pb2_grpc.ControlStub(channel))
    for text, answer in zip(texts, answers, strict=True):
        assert answer.ids() == expected_tokens(text.encode(), 30, 258)
    assert load.preemptions > 0, "the cache holds about five of them"
    assert (load.running, load.waiting, load.blocks_referenced, load.host_blocks_used) == (0, 0, 0, 0)
    assert load.host_blocks_total == int(float(host_kv_gb) * 1e9) // (8 * 4)
    loaded = sum(answer.responses[-1].timing.loaded_tokens for answer in answers)
    assert load.loaded_tokens == loaded
    assert (loaded > 0) == (load.saved_tokens > 0) == (load.host_blocks_total > 0)
