"""What a request gets that asks for nothing but an answer, from the default model with the default cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.end_to_end.asking import ask, engine_load, request
from tests.servers import Server, running_server

STREAMS = 64


@pytest.fixture(scope="module")
def hot_model(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, with authors who recommend a high temperature."""
    folder = tmp_path_factory.mktemp("models") / "hot"
    folder.mkdir()
    for file in default_model_folder.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0], "do_sample": true, "temperature": 3.0}')
    return folder


@pytest.fixture(scope="module")
def server(hot_model: Path) -> Iterator[Server]:
    with running_server("--model", str(hot_model)) as server:
        yield server


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def test_64_streams_without_max_tokens_run_at_once(channel: grpc.Channel) -> None:
    inference, control = inference_pb2_grpc.InferenceStub(channel), control_pb2_grpc.ControlStub(channel)
    info = control.GetServerInfo(control_pb2.GetServerInfoRequest())
    (model,) = control.ListModels(control_pb2.ListModelsRequest()).models
    assert STREAMS * model.max_model_len > info.limits.max_queued_tokens, "not all of them may fill the context"
    asked = inference_pb2.GenerateRequest(prompt="Once upon a time", stopping={"ignore_eos": True})
    streams = [inference.Generate(asked, timeout=300) for _ in range(STREAMS)]
    for stream in streams:
        assert next(stream).HasField("tokens")  # it runs, and nothing but its cancellation ends it soon
    load = control.GetLoad(control_pb2.GetLoadRequest())
    assert (engine_load(control).running, load.requests) == (STREAMS, STREAMS)
    assert engine_load(control).preemptions == 0
    for stream in streams:
        stream.cancel()
    assert all(stream.code() is grpc.StatusCode.CANCELLED for stream in streams)


def test_recommended_sampling_holds_until_a_request_says_otherwise(channel: grpc.Channel) -> None:
    inference = inference_pb2_grpc.InferenceStub(channel)

    def ids(**sampling: float) -> list[int]:
        return ask(inference, request("The capital of Sweden is", max_tokens=8, sampling=sampling)).ids()

    greedy = ids(temperature=0)
    assert ids(temperature=0) == greedy
    assert ids(seed=1) == ids(seed=1, temperature=3)
    assert len({tuple(greedy), tuple(ids(seed=1)), tuple(ids(seed=2))}) == 3


@pytest.mark.slow
def test_a_server_can_ignore_what_is_recommended(hot_model: Path) -> None:
    with (
        running_server("--model", str(hot_model), "--sampling-defaults", "none") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)
        silent, greedy = (
            ask(inference, request("The capital of Sweden is", max_tokens=8, sampling=sampling)).ids()
            for sampling in ({}, {"temperature": 0.0})
        )
        assert silent == greedy
        (model,) = control_pb2_grpc.ControlStub(channel).ListModels(control_pb2.ListModelsRequest()).models
        assert model.recommended_sampling.temperature == 3


def test_what_must_not_be_said_is_not_said(channel: grpc.Channel) -> None:
    inference = inference_pb2_grpc.InferenceStub(channel)
    asked = request("one two one two one two one two", max_tokens=24, sampling={"temperature": 0})
    answer = ask(inference, asked)
    assert "one" in answer.text(), "it repeats the pattern if it may"
    asked.sampling.bad_words.append("one")
    assert "one" not in ask(inference, asked).text()
    del asked.sampling.bad_words[:]
    asked.sampling.no_repeat_ngram_size = 2
    asked.output.prompt = True
    answer = ask(inference, asked)
    tokens = [*answer.prompt_ids(), *answer.ids()]
    pairs = list(itertools.pairwise(tokens))
    first = len(answer.prompt_ids()) - 1  # the first pair that the output ends
    assert not any(pair in pairs[:at] for at, pair in enumerate(pairs) if at >= first)
