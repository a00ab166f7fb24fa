"""vLLM's engine protocol on real sockets, and its requests translated."""

from __future__ import annotations

import hashlib
import io
import time
import zipfile
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagoda.v1 import control_pb2_grpc, inference_pb2
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.router.adapters.protocols import smg_common_pb2
from pagoda_server.router.adapters.protocols import vllm_engine_pb2 as vllm
from pagoda_server.router.adapters.vllm import MAX_ABORTS, request_from
from pagoda_server.router.errors import InvalidArgument, Unimplemented
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.validation import validate_generate
from tests.end_to_end.asking import engine_load
from tests.end_to_end.test_readouts import logprobs
from tests.servers import Server

LIMITS = Limits(max_model_len=100, vocab_size=50, kv_token_capacity=1000)
PROMPT = list(b"steady")


class Engine:
    """A client of the service."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def ask(self, method: str, request: Any, kind: Any) -> Any:
        name = f"/vllm.grpc.engine.VllmEngine/{method}"
        return self._channel.unary_unary(name, type(request).SerializeToString, kind.FromString)(request, timeout=60)

    def started(self, request: Any, method: str = "Generate", kind: Any = vllm.GenerateResponse) -> Any:
        name = f"/vllm.grpc.engine.VllmEngine/{method}"
        return self._channel.unary_stream(name, type(request).SerializeToString, kind.FromString)(request, timeout=60)

    def chunks(self, request: vllm.GenerateRequest) -> list[vllm.GenerateResponse]:
        return list(self.started(request))


@pytest.fixture
def engine(channel: grpc.Channel) -> Engine:
    return Engine(channel)


def asking(*, stream: bool = True, max_tokens: int = 5, **params: Any) -> vllm.GenerateRequest:
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params}
    return vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(input_ids=PROMPT), sampling_params=vllm.SamplingParams(**sampling), stream=stream
    )


def refusal(engine: Engine, request: vllm.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    """The status's code, and the field that its details name."""
    with pytest.raises(grpc.RpcError) as caught:
        engine.chunks(request)
    violations = error_details_pb2.BadRequest()
    for detail in rpc_status.from_call(caught.value).details:
        detail.Unpack(violations)
    return caught.value.code(), violations.field_violations[0].field


def test_a_stream_has_chunks_and_then_the_end(engine: Engine) -> None:
    *chunks, last = engine.chunks(asking(max_tokens=20))
    assert [id for each in chunks for id in each.chunk.token_ids] == expected_tokens(PROMPT, 20, 258)
    assert all(each.chunk.completion_tokens == len(each.chunk.token_ids) for each in chunks)
    assert {each.chunk.prompt_tokens for each in chunks} == {len(PROMPT)}
    assert (last.complete.finish_reason, last.complete.completion_tokens) == ("length", 20)
    assert not last.complete.output_ids, "they were in the chunks"


def test_without_stream_each_sequence_comes_whole(engine: Engine) -> None:
    answers = engine.chunks(asking(stream=False, max_tokens=20, n=2, logprobs=2))
    assert [answer.complete.index for answer in answers] == [0, 1]
    for answer in answers:
        complete = answer.complete
        assert list(complete.output_ids) == expected_tokens(PROMPT, 20, 258)
        assert (complete.prompt_tokens, complete.completion_tokens) == (len(PROMPT), 20)
        assert list(complete.output_logprobs.token_ids) == list(complete.output_ids)
        assert [len(top.token_ids) for top in complete.output_logprobs.top_logprobs] == [2] * 20


def test_the_end_says_what_matched_and_what_was_cached(engine: Engine) -> None:
    stop_id = expected_tokens(PROMPT, 3, 258)[2]
    by_id = engine.chunks(asking(stop_token_ids=[stop_id]))[-1].complete
    assert (by_id.finish_reason, by_id.matched_token_id, by_id.completion_tokens) == ("stop", stop_id, 3)
    text = vllm.GenerateRequest(text="a prompt of a few blocks", sampling_params=asking(max_tokens=30).sampling_params)
    again = [engine.chunks(text)[-1].complete for _ in range(2)][1]
    assert again.prompt_tokens == 24
    assert again.cached_tokens > 0


def test_a_stop_string_ends_a_sequence_of_tokens(engine: Engine) -> None:
    # The synthetic model's tokens are bytes; most are no text, so the string is one that its output has.
    ids = expected_tokens(PROMPT, 60, 258)
    letter = next(id for id in ids if id < 128 and chr(id).isprintable())
    complete = engine.chunks(asking(max_tokens=60, stop=[chr(letter)], skip_special_tokens=True))[-1].complete
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", chr(letter))
    assert complete.completion_tokens == ids.index(letter) + 1


def test_an_answer_is_one_of_several_texts(engine: Engine) -> None:
    choices = ["yes", "no", "maybe"]
    complete = engine.chunks(asking(stream=False, max_tokens=20, choice={"choices": choices}))[-1].complete
    assert (bytes(complete.output_ids).decode() in choices, complete.finish_reason) == (True, "stop")


@pytest.mark.parametrize("stream", [True, False])
def test_the_prompts_log_probabilities_come_once_for_each_sequence(engine: Engine, stream: bool) -> None:
    text = "longer than one message of log-probabilities " * 9
    request = asking(stream=stream, max_tokens=20, n=2, prompt_logprobs=2)
    request.tokenized.input_ids[:] = text.encode()
    answers = engine.chunks(request)
    found = [each.chunk if each.HasField("chunk") else each.complete for each in answers]
    told = [each.input_logprobs for each in found if each.HasField("input_logprobs")]
    assert sorted(each.index for each in found if each.HasField("input_logprobs")) == [0, 1]
    for each in told:
        assert bytes(each.token_ids) == text.encode()
        assert not each.token_logprobs[0].HasField("value")
        assert [one.value for one in each.token_logprobs[1:]] == logprobs([*text.encode()])
        assert [len(top.token_ids) for top in each.top_logprobs] == [0] + [2] * (len(text) - 1)
    assert not any(each.HasField("output_logprobs") for each in found)


def test_abort_ends_a_request_and_forgives_unknown_ids(engine: Engine) -> None:
    request = asking(max_tokens=20_000)
    request.request_id = "vllm-1"
    stream = engine.started(request)
    next(stream)
    engine.ask("Abort", vllm.AbortRequest(request_ids=["unknown", "vllm-1"]), vllm.AbortResponse)
    assert [*stream][-1].complete.finish_reason == "abort"
    many = vllm.AbortRequest(request_ids=["x"] * (MAX_ABORTS + 1))
    with pytest.raises(grpc.RpcError) as caught:
        engine.ask("Abort", many, vllm.AbortResponse)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_cancel_frees_what_the_request_holds(engine: Engine, control: control_pb2_grpc.ControlStub) -> None:
    stream = engine.started(asking(max_tokens=20_000))
    next(stream)
    assert engine_load(control).running == 1
    stream.cancel()
    while engine_load(control).running:
        time.sleep(0.01)


def test_a_gateway_learns_what_it_asks_at_its_start(engine: Engine, synthetic_server: Server) -> None:
    health = engine.ask("HealthCheck", vllm.HealthCheckRequest(), vllm.HealthCheckResponse)
    assert (health.healthy, health.message) == (True, "serving")
    model = engine.ask("GetModelInfo", vllm.GetModelInfoRequest(), vllm.GetModelInfoResponse)
    assert (model.served_model_name, model.is_generation, model.vocab_size) == ("synthetic", True, 258)
    assert "/" not in model.model_path, "paths of this machine stay here"
    info = engine.ask("GetServerInfo", vllm.GetServerInfoRequest(), vllm.GetServerInfoResponse)
    assert (info.is_paused, info.data_parallel_size) == (False, 1)
    assert info.max_num_seqs > 0
    loads = engine.ask("GetLoads", vllm.GetLoadsRequest(), vllm.GetLoadsResponse)
    (load,) = loads.loads
    assert (load.num_running_reqs, load.num_used_tokens) == (0, 0)
    assert load.max_total_num_tokens > 0
    with pytest.raises(grpc.RpcError) as caught:
        engine.ask("Embed", vllm.HealthCheckRequest(), vllm.HealthCheckResponse)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_tokenizer_comes_as_an_archive_that_is_the_same_each_time(engine: Engine) -> None:
    chunk = smg_common_pb2.GetTokenizerChunk
    first, second = (
        list(engine.started(smg_common_pb2.GetTokenizerRequest(), "GetTokenizer", chunk)) for _ in range(2)
    )
    archive = b"".join(each.data for each in first)
    assert [each.sha256 for each in first] == ["" for _ in first[1:]] + [hashlib.sha256(archive).hexdigest()]
    assert first == second
    names = zipfile.ZipFile(io.BytesIO(archive)).namelist()
    assert {"tokenizer.json", "config.json"} <= set(names)
    assert not [name for name in names if name.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": 200.0}, "sampling_params.temperature"),
        ({"stop": ["x"] * 17}, "sampling_params.stop"),
        ({"stop_token_ids": [258]}, "sampling_params.stop_token_ids[0]"),
        ({"max_tokens": 1_000_000}, "sampling_params.max_tokens"),
        ({"logprobs": -1}, "sampling_params.logprobs"),
        ({"logit_bias": {-1: 1.0}}, "sampling_params.logit_bias"),
        ({"regex": "("}, "sampling_params.regex"),
        ({"grammar": "start: ("}, "sampling_params.grammar"),
        ({"json_schema": "["}, "sampling_params.json_schema"),
        ({"choice": {}}, "sampling_params.choice.choices"),
        ({"choice": {"choices": ["x"] * 5000}}, "sampling_params.choice.choices"),
        ({"prompt_logprobs": -1}, "sampling_params.prompt_logprobs"),
    ],
)
def test_a_wrong_field_is_named_as_the_client_knows_it(engine: Engine, params: dict[str, Any], field: str) -> None:
    assert refusal(engine, asking(**params)) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_wrong_inputs_are_named(engine: Engine) -> None:
    for ids, field in (([], "tokenized.input_ids"), ([258], "tokenized.input_ids[0]"), ([1] * 200_000, None)):
        request = asking()
        request.tokenized.CopyFrom(vllm.TokenizedInput(input_ids=ids))
        assert refusal(engine, request) == (grpc.StatusCode.INVALID_ARGUMENT, field or "tokenized.input_ids")
    assert refusal(engine, vllm.GenerateRequest()) == (grpc.StatusCode.INVALID_ARGUMENT, "input")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (vllm.GenerateRequest(sampling_params={"structural_tag": "{}"}), "sampling_params.structural_tag"),
        (vllm.GenerateRequest(sampling_params={"truncate_prompt_tokens": 1}), "sampling_params.truncate_prompt_tokens"),
        (vllm.GenerateRequest(mm_inputs={}), "mm_inputs"),
        (vllm.GenerateRequest(kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (vllm.GenerateRequest(extra_mm_inputs=[{}]), "extra_mm_inputs"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(request_: vllm.GenerateRequest, field: str) -> None:
    with pytest.raises(Unimplemented) as caught:
        request_from(request_, LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("format", "ours", "value"),
    [("json_schema", "json_schema", "{}"), ("regex", "regex", "a"), ("grammar", "ebnf_grammar", "start: A")],
)
def test_formats_of_the_answer_are_ours(format: str, ours: str, value: str) -> None:
    params = vllm.SamplingParams(**{format: value})  # type: ignore[arg-type]
    request = request_from(vllm.GenerateRequest(text="x", sampling_params=params), LIMITS)
    assert getattr(request.guided, ours) == value
    assert request.guided.WhichOneof("format") == ours
    choice = vllm.GenerateRequest(text="x", sampling_params={"choice": {"choices": ["a", "b"]}})
    assert list(request_from(choice, LIMITS).guided.choice.options) == ["a", "b"]


def test_another_rank_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="data_parallel_rank"):
        request_from(vllm.GenerateRequest(text="x", data_parallel_rank=1), LIMITS)


def test_fields_that_are_not_set_have_the_servers_defaults() -> None:
    request = request_from(vllm.GenerateRequest(text="x"), LIMITS)
    assert not request.sampling.HasField("temperature")
    params = validate_generate(request, LIMITS)
    sampling = params.sampling
    assert (sampling.top_p, sampling.top_k, sampling.n, sampling.repetition_penalty) == (1.0, 0, 1, 1.0)
    assert params.max_tokens is None, "the server's default holds"
    assert not params.has_text, "nothing here shows text"
    greedy = request_from(vllm.GenerateRequest(text="x", sampling_params={"temperature": 0.0}), LIMITS)
    assert greedy.sampling.HasField("temperature")
    assert greedy.sampling.temperature == 0


def test_fields_that_are_not_set_have_what_the_model_recommends() -> None:
    limits = replace(LIMITS, recommended=inference_pb2.Sampling(temperature=0.5, top_p=0.75, repetition_penalty=1.5))
    theirs = vllm.GenerateRequest(text="x", sampling_params={"top_p": 0.25})
    sampling = validate_generate(request_from(theirs, limits), limits).sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.5, 0.25, 1.5)


def test_all_that_both_have_is_translated() -> None:
    theirs = vllm.SamplingParams(
        temperature=0.5, top_p=0.75, top_k=3, min_p=0.25, frequency_penalty=1, presence_penalty=2,
        repetition_penalty=1.5, max_tokens=7, min_tokens=2, stop=["end"], stop_token_ids=[4], ignore_eos=True, n=2,
        logprobs=3, prompt_logprobs=2, seed=-1, logit_bias={5: 1.5},
    )  # fmt: skip
    ours = request_from(vllm.GenerateRequest(request_id="a", text="x", sampling_params=theirs), LIMITS)
    assert ours == inference_pb2.GenerateRequest(
        request_id="a",
        prompt="x",
        sampling=inference_pb2.Sampling(
            temperature=0.5, top_p=0.75, top_k=3, min_p=0.25, frequency_penalty=1, presence_penalty=2,
            repetition_penalty=1.5, n=2, seed=(1 << 64) - 1, logit_bias={5: 1.5},
        ),
        stopping=inference_pb2.Stopping(
            max_tokens=7, min_tokens=2, stop=["end"], stop_token_ids=[4], ignore_eos=True,
        ),
        output=inference_pb2.Output(text=True, special_tokens=True, logprobs=3, prompt_logprobs=2),
    )  # fmt: skip
