"""What a request gets that asks for nothing but an answer, from the default model with the default cache."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pagoda import Client, NotFound
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.checkpoints import resolve
from pagoda_server.router.adapters.protocols import kserve_pb2 as kserve
from pagoda_server.router.adapters.protocols import vllm_engine_pb2 as vllm
from tests.checkpoints.tiny_gguf import tiny_model
from tests.end_to_end.asking import ask, engine_load, request
from tests.servers import Server, running_server

pytestmark = pytest.mark.thorough

STREAMS = 64


def recommending(model: Path, folder: Path, **generation: object) -> Path:
    """The model in another folder, whose generation_config.json recommends this."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]} | generation))
    return folder


@pytest.fixture(scope="module")
def hot_model(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, with authors who recommend a high temperature."""
    folder = tmp_path_factory.mktemp("models") / "hot"
    return recommending(default_model_folder, folder, do_sample=True, temperature=3.0)


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
    asked = request("The capital of France is", max_tokens=24, sampling={"temperature": 0})
    assert "Paris" in ask(inference, asked).text()
    asked.sampling.bad_words.append("Paris")
    assert "Paris" not in ask(inference, asked).text()
    asked = request("one two one two one two one two", max_tokens=24, sampling={"temperature": 0})
    asked.sampling.no_repeat_ngram_size = 2
    asked.output.prompt = True
    answer = ask(inference, asked)
    tokens = [*answer.prompt_ids(), *answer.ids()]
    pairs = list(itertools.pairwise(tokens))
    first = len(answer.prompt_ids()) - 1  # the first pair that the output ends
    assert not any(pair in pairs[:at] for at, pair in enumerate(pairs) if at >= first)


PROMPT, LENGTH, SEED = "Once upon a time, in a village by the sea,", 24, 7


def answers_on_every_protocol(server: Server, model: str) -> dict[str, str]:
    """What each protocol answers to a request that sets nothing but its length and a seed."""
    found = {}
    with grpc.insecure_channel(server.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        found["gRPC"] = ask(inference, request(PROMPT, LENGTH, sampling={"seed": SEED})).text()

        params = vllm.SamplingParams(seed=SEED, max_tokens=LENGTH, ignore_eos=True)
        engine = channel.unary_stream(
            "/vllm.grpc.engine.VllmEngine/Generate",
            vllm.GenerateRequest.SerializeToString,
            vllm.GenerateResponse.FromString,
        )
        (whole,) = engine(vllm.GenerateRequest(text=PROMPT, sampling_params=params), timeout=60)
        ids = inference_pb2.DetokenizeRequest(token_ids=whole.complete.output_ids)
        found["VllmEngine"] = inference.Detokenize(ids).text

        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            kserve.ModelInferRequest.SerializeToString,
            kserve.ModelInferResponse.FromString,
        )
        theirs = kserve.ModelInferRequest(model_name=model)
        sampling = json.dumps({"seed": SEED, "max_tokens": LENGTH, "ignore_eos": True})
        for name, text in (("text_input", PROMPT), ("sampling_parameters", sampling)):
            theirs.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
        excluded = theirs.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
        excluded.contents.bool_contents.append(True)
        (output,) = infer(theirs, timeout=60).raw_output_contents
        found["KServe"] = output[4:].decode()

    body = json.dumps({"prompt": PROMPT, "max_tokens": LENGTH, "seed": SEED, "ignore_eos": True}).encode()
    with urllib.request.urlopen(f"{server.http}/v1/completions", body, timeout=60) as response:
        found["HTTP"] = json.load(response)["choices"][0]["text"]

    command = [sys.executable, "-m", "pagoda_server.cli", "generate", "--raw", PROMPT, "--address", server.address]
    command += ["--max-tokens", str(LENGTH), "--seed", str(SEED)]
    found["pagoda generate"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.removesuffix(
        "\n"
    )
    return found


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        pytest.param(
            {"do_sample": True, "temperature": 0.2, "top_p": 0.9}, {"temperature": 0.2, "top_p": 0.9}, id="recommended"
        ),
        pytest.param({}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}, id="nothing recommended"),
    ],
)
def test_a_request_that_says_nothing_is_drawn_in_the_same_way_on_every_protocol(
    generation: dict[str, object], sampling: dict[str, float], default_model_folder: Path, tmp_path: Path
) -> None:
    model = recommending(default_model_folder, tmp_path / "model", **generation)
    with (
        running_server("--model", str(model), "--dtype", "float32", "--http", "127.0.0.1:0") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)
        explicit, others = (
            ask(inference, request(PROMPT, LENGTH, sampling={"seed": SEED, **given})).text()
            for given in (sampling, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
        )
        assert explicit != others
        answers = answers_on_every_protocol(server, model.name)
    assert answers == dict.fromkeys(answers, explicit)


def test_a_gguf_file_is_called_by_its_name_without_the_suffix_or_by_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path / "cache"))
    path = tiny_model("qwen2").write(tmp_path / "tiny.Q8_0.gguf")
    folder = resolve(str(path))
    with (
        running_server("--model", str(path), "--http", "127.0.0.1:0") as server,
        Client(server.address) as client,
    ):
        assert client.models()[0].name == "tiny.Q8_0"
        for name in ("tiny.Q8_0", folder.name):
            client.answer(prompt="a", model=name, max_tokens=1)
            with urllib.request.urlopen(f"{server.http}/v1/models/{name}", timeout=60) as response:
                assert json.load(response)["id"] == "tiny.Q8_0"
        with pytest.raises(NotFound, match=r"the served model is tiny\.Q8_0$"):
            client.answer(prompt="a", model="tiny", max_tokens=1)
