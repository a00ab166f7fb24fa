"""KServe's protocol on real sockets, and its requests translated."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from pagoda.v1 import control_pb2_grpc, inference_pb2
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.router.adapters import kserve as adapter
from pagoda_server.router.adapters.kserve import MAX_IN_FLIGHT, MAX_STREAMS
from pagoda_server.router.adapters.kserve_tensors import INPUTS, asked_from
from pagoda_server.router.adapters.protocols import kserve_pb2 as kserve
from pagoda_server.router.errors import InvalidArgument, PagodaError, ResourceExhausted, Unimplemented
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.output import ClientWriter
from pagoda_server.router.request.validation import validate_generate
from pagoda_server.router.tenants.caller import ANYONE, set_caller
from tests.end_to_end.asking import engine_load
from tests.servers import Server, running_server

LIMITS = Limits(max_model_len=100, vocab_size=50, kv_token_capacity=1000)
GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


def inferring(
    text: str = "steady",
    id: str = "",
    *,
    parameters: dict[str, Any] | str | None = None,
    raw: bool = False,
    outputs: tuple[str, ...] = (),
    **flags: bool,
) -> kserve.ModelInferRequest:
    request = kserve.ModelInferRequest(model_name="synthetic", id=id)
    sampling = parameters if isinstance(parameters, str) else json.dumps(GREEDY if parameters is None else parameters)
    for name, value in {"text_input": text, "sampling_parameters": sampling, **flags}.items():
        tensor = request.inputs.add(name=name, datatype=INPUTS[name], shape=[1])
        content = value.encode() if isinstance(value, str) else b""
        if raw and isinstance(value, str):
            request.raw_input_contents.append(struct.pack("<I", len(content)) + content)
        elif raw:
            request.raw_input_contents.append(bytes([value]))
        elif isinstance(value, str):
            tensor.contents.bytes_contents.append(content)
        else:
            tensor.contents.bool_contents.append(value)
    for name in outputs:
        request.outputs.add(name=name)
    return request


class Model:
    """A client of the service."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def ask(self, method: str, request: Any, kind: Any) -> Any:
        name = f"/inference.GRPCInferenceService/{method}"
        return self._channel.unary_unary(name, type(request).SerializeToString, kind.FromString)(request, timeout=60)

    def infer(self, request: kserve.ModelInferRequest) -> kserve.ModelInferResponse:
        return self.ask("ModelInfer", request, kserve.ModelInferResponse)

    def stream(self, requests: Iterator[Any], serialize: Any = kserve.ModelInferRequest.SerializeToString) -> Any:
        name = "/inference.GRPCInferenceService/ModelStreamInfer"
        call = self._channel.stream_stream(name, serialize, kserve.ModelStreamInferResponse.FromString)
        return call(requests, timeout=60)


@pytest.fixture
def model(channel: grpc.Channel) -> Model:
    return Model(channel)


class Requests:
    """A stream's requests, sent when they are put."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()

    def put(self, *requests: Any) -> None:
        for request in requests:
            self._queue.put(request)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue.get, None)


def tensors(response: kserve.ModelInferResponse) -> dict[str, list[Any]]:
    """The values of a response's tensors."""
    found: dict[str, list[Any]] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        values: list[Any] = found.setdefault(tensor.name, [])
        while raw:
            (number,), raw = struct.unpack("<I", raw[:4]), raw[4:]
            if tensor.datatype == "BYTES":
                values.append(raw[:number].decode())
                raw = raw[number:]
            else:
                values.append(number)
        assert list(tensor.shape) == [len(values)]
    return found


def text_of(text: str, count: int) -> str:
    """What the synthetic model continues a text with: its tokens are bytes, and the last two are special."""
    ids = expected_tokens(text.encode(), count, 258)
    return bytes(id for id in ids if id < 256).decode(errors="replace")


@pytest.mark.parametrize("raw", [True, False])
def test_one_answer_has_the_input_and_the_text(model: Model, raw: bool) -> None:
    outputs = ("text_output", "num_input_tokens")
    request = inferring(
        "steady", "7", raw=raw, outputs=outputs, return_finish_reason=True, return_num_output_tokens=True
    )
    response = model.infer(request)
    assert (response.model_name, response.model_version, response.id) == ("synthetic", "1", "7")
    assert tensors(response) == {
        "text_output": ["steady" + text_of("steady", 20)],
        "finish_reason": ["length"],
        "num_input_tokens": [6],
        "num_output_tokens": [20],
    }
    without = model.infer(inferring("steady", raw=raw, exclude_input_in_output=True))
    assert tensors(without) == {"text_output": [text_of("steady", 20)]}


def test_several_sequences_are_several_values(model: Model) -> None:
    request = inferring(
        "steady", parameters={**GREEDY, "n": 3}, exclude_input_in_output=True, return_finish_reason=True
    )
    assert tensors(model.infer(request)) == {
        "text_output": [text_of("steady", 20)] * 3,
        "finish_reason": ["length"] * 3,
    }


@pytest.mark.parametrize("as_text", [True, False])
def test_an_answer_has_the_format_that_vllm_calls_structured_outputs(model: Model, as_text: bool) -> None:
    for formats, pattern in (
        ({"choice": ["Positive", "Negative"]}, "Positive|Negative"),
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"grammar": 'root ::= "<" [0-9] ">"'}, "<[0-9]>"),
        ({"json": {"type": "integer", "minimum": 0, "maximum": 99}}, "[0-9]{1,2}"),
        ({"json_object": True}, r"\{.*"),
    ):
        given = GREEDY | {"structured_outputs": json.dumps(formats) if as_text else formats}
        (text,) = tensors(model.infer(inferring(parameters=given, exclude_input_in_output=True)))["text_output"]
        assert re.fullmatch(pattern, text, re.DOTALL)


def test_a_wrong_format_is_named_as_the_client_knows_it(model: Model) -> None:
    path = "sampling_parameters.structured_outputs"
    for formats, told in (
        ({"json": "["}, f"{path}.json: is not JSON"),
        ({"grammar": "start: ("}, f"{path}.grammar: is wrong at line 1"),
        ({"regex": "("}, f"{path}.regex: has a regular expression that cannot be used"),
        ({"choice": []}, f"{path}.choice: holds no text"),
        ({"regex": "a", "choice": ["a"]}, f"{path}: must hold one format"),
        ({"structural_tag": "{}"}, f"{path}.structural_tag: is not a field that this server knows"),
        ("[", f"{path}: is not JSON"),
        (1, f"{path}: must be an object"),
        ({"regex": "\ud800"}, f"{path}: holds half a character"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            model.infer(inferring(parameters={"structured_outputs": formats}))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith(told)


def test_a_stream_answers_its_requests_side_by_side(model: Model) -> None:
    requests = Requests()
    requests.put(
        inferring("steady", "long", parameters=GREEDY | {"max_tokens": 200}, stream=True, return_finish_reason=True),
        inferring("other", "whole"),
        inferring("steady", "bad", parameters={"temperature": 1000}),
        inferring("again", "long", stream=True, raw=True),
    )
    requests.end()
    texts: dict[str, str] = {}
    finals: list[str] = []
    errors: dict[str, str] = {}
    for response in model.stream(iter(requests)):
        inferred = response.infer_response
        if response.error_message:
            errors[inferred.id] = response.error_message
            continue
        values = tensors(inferred)
        key = inferred.id + ("" if "finish_reason" in values else "+")
        texts[key] = texts.get(key, "") + values["text_output"][0]
        if inferred.parameters["triton_final_response"].bool_param:
            finals.append(key)
    assert texts == {
        "long": text_of("steady", 200),
        "whole+": "other" + text_of("other", 20),
        "long+": text_of("again", 20),
    }
    assert sorted(finals) == ["long", "long+", "whole+"]
    assert finals[-1] == "long", "the longest ends last: the others did not wait for it"
    assert errors == {"bad": "sampling_parameters.temperature: is 1000, must be in [0, 100]"}


def test_a_stream_waits_for_requests(model: Model) -> None:
    requests = Requests()
    responses = model.stream(iter(requests))
    for id in ("first", "second"):
        requests.put(inferring("steady", id))
        assert next(responses).infer_response.id == id
    requests.end()
    assert list(responses) == []


def test_a_malformed_request_ends_itself_alone(model: Model) -> None:
    requests = Requests()
    responses = model.stream(iter(requests), serialize=lambda raw: raw)
    requests.put(b"\xff", inferring("steady", "good").SerializeToString())
    requests.end()
    answers = {response.infer_response.id: response.error_message for response in responses}
    assert answers == {"": "request: is malformed: not the protobuf message of this call", "good": ""}


def test_a_cancelled_stream_frees_all_its_requests(model: Model, control: control_pb2_grpc.ControlStub) -> None:
    requests = Requests()
    responses = model.stream(iter(requests))
    requests.put(*(inferring(f"{at}", parameters=GREEDY | {"max_tokens": 9000}, stream=True) for at in range(4)))
    ids = set()
    while engine_load(control).running < 4:
        ids.add(next(responses).infer_response.id)
    responses.cancel()
    requests.end()
    while engine_load(control).running:
        time.sleep(0.01)


def test_requests_and_streams_are_bounded() -> None:
    with (
        running_server("--model", "synthetic", "--step-ms", "2", "--max-requests", "40") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        model, control = Model(channel), control_pb2_grpc.ControlStub(channel)
        requests, more = Requests(), Requests()
        long = GREEDY | {"max_tokens": 20_000}
        responses = model.stream(iter(requests))
        requests.put(*(inferring(f"{at}", f"{at}", parameters=long, stream=True) for at in range(MAX_IN_FLIGHT + 5)))
        while engine_load(control).running + engine_load(control).waiting < MAX_IN_FLIGHT:
            next(responses)
        for _ in range(20):
            next(responses)
        load = engine_load(control)
        assert load.running + load.waiting == MAX_IN_FLIGHT, "the stream is not read on"
        # What the server does not admit ends by itself, and not the stream.
        others = model.stream(iter(more))
        more.put(*(inferring(f"other {at}", parameters=long, stream=True) for at in range(20)))
        refused = next(response.error_message for response in others if response.error_message)
        assert refused.startswith("the queue is full")
        # A call of its own is refused unread, and told when to come back.
        with pytest.raises(grpc.RpcError) as caught:
            model.infer(inferring())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "grpc-retry-pushback-ms" in dict(caught.value.trailing_metadata())
        silent = [Requests() for _ in range(MAX_STREAMS)]
        idle = [model.stream(iter(each)) for each in silent]
        while not (ended := [call for call in idle if not call.is_active()]):
            time.sleep(0.01)
        assert {call.code() for call in ended} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in (responses, others, *idle):
            call.cancel()
        for each in (requests, more, *silent):
            each.end()


class Given:
    """The gRPC call of a stream that has these requests and is then silent."""

    def __init__(self, *requests: bytes, reads: bool = True) -> None:
        self._requests = [*requests]
        self._reads = reads
        self.written: list[kserve.ModelStreamInferResponse] = []

    async def read(self) -> Any:
        if not self._requests:
            await asyncio.sleep(60)
        return self._requests.pop(0)

    async def write(self, response: kserve.ModelStreamInferResponse) -> None:
        if not self._reads:
            await asyncio.sleep(60)
        self.written.append(response)

    def invocation_metadata(self) -> Any:
        return ()

    def time_remaining(self) -> None:
        return None


class Slow:
    """An Inference service that answers with one token after a while."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def refusal(self, tenant: str) -> None:
        return None

    async def generate(self, call: Any, parse: Any, route: str) -> None:
        parse(await call.read(), LIMITS)
        assert await call.read() is grpc.aio.EOF
        await asyncio.sleep(self._delay_s)
        usage, tokens = inference_pb2.Usage(), inference_pb2.Tokens(text="x")
        async with ClientWriter(call, stall_timeout_s=0.1) as writer:
            await writer.write(inference_pb2.GenerateResponse(tokens=tokens))
            await writer.write(inference_pb2.GenerateResponse(finished={"reason": 1}, usage=usage))


async def stream_ended(given: Given, delay_s: float) -> ResourceExhausted:
    set_caller(ANYONE)
    inference: Any = Slow(delay_s)
    context: Any = given
    with pytest.raises(ResourceExhausted) as caught:
        await adapter._Stream(context, inference, stall_timeout_s=0.1).run()
    return caught.value


@pytest.mark.usefixtures("virtual_time")
async def test_a_stream_ends_that_stays_idle_and_not_while_a_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "IDLE_S", 0.2)
    given = Given(inferring().SerializeToString())
    assert "idle for 0.2 s" in (await stream_ended(given, delay_s=0.6)).message
    assert [response.infer_response.parameters["triton_final_response"].bool_param for response in given.written] == [
        True
    ]


@pytest.mark.usefixtures("virtual_time")
async def test_a_stream_ends_whose_client_does_not_read() -> None:
    given = Given(*[inferring(f"{at}", stream=True).SerializeToString() for at in range(3)], reads=False)
    assert "has read nothing" in (await stream_ended(given, delay_s=0.0)).message
    assert not given.written


def test_errors_have_a_status(model: Model) -> None:
    for request, code, details in (
        (inferring(stream=True), grpc.StatusCode.INVALID_ARGUMENT, "stream: is true; ModelStreamInfer streams"),
        (inferring(parameters="{"), grpc.StatusCode.INVALID_ARGUMENT, "sampling_parameters: is not JSON"),
        (inferring(text=""), grpc.StatusCode.INVALID_ARGUMENT, "text_input: is empty"),
        (
            inferring(parameters={"best_of": 2}),
            grpc.StatusCode.UNIMPLEMENTED,
            "sampling_parameters.best_of: is not supported by this server",
        ),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            model.infer(request)
        assert (caught.value.code(), caught.value.details()) == (code, details)
    other = inferring()
    other.model_name = "other"
    with pytest.raises(grpc.RpcError) as caught:
        model.infer(other)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_server_and_model_tell_of_themselves(model: Model, synthetic_server: Server) -> None:
    assert model.ask("ServerLive", kserve.ServerLiveRequest(), kserve.ServerLiveResponse).live
    assert model.ask("ServerReady", kserve.ServerReadyRequest(), kserve.ServerReadyResponse).ready
    for name, version, is_ready in (("synthetic", "", True), ("synthetic", "2", False), ("other", "", False)):
        request = kserve.ModelReadyRequest(name=name, version=version)
        assert model.ask("ModelReady", request, kserve.ModelReadyResponse).ready is is_ready
    assert model.ask("ServerMetadata", kserve.ServerMetadataRequest(), kserve.ServerMetadataResponse).name == "pagoda"
    about = model.ask("ModelMetadata", kserve.ModelMetadataRequest(name="synthetic"), kserve.ModelMetadataResponse)
    assert {tensor.name: tensor.datatype for tensor in about.inputs} == INPUTS
    assert {tensor.name for tensor in about.outputs} >= {"text_output", "finish_reason"}


# -- translation -------------------------------------------------------------------------------------------------------


def test_strings_may_stand_for_numbers_as_in_the_examples_of_triton() -> None:
    given = {"temperature": "0.5", "top_p": "0.75", "max_tokens": "7", "ignore_eos": "True", "top_k": -1, "seed": None}
    ours = asked_from(inferring(parameters=given), LIMITS).request
    assert (ours.sampling.temperature, ours.sampling.top_p, ours.sampling.top_k) == (0.5, 0.75, 0)
    assert (ours.stopping.max_tokens, ours.stopping.ignore_eos) == (7, True)
    assert not ours.sampling.HasField("seed")


def test_all_that_both_have_is_translated() -> None:
    given = {
        "bad_words": ["bad"],
        "temperature": 0.5, "top_p": 0.75, "top_k": 3, "min_p": 0.25, "presence_penalty": 1, "frequency_penalty": 2,
        "repetition_penalty": 1.5, "n": 2, "seed": -1, "logit_bias": {"5": 1.5}, "allowed_token_ids": [1, 2],
        "max_tokens": 7, "min_tokens": 2, "ignore_eos": True, "stop": "end", "stop_token_ids": [4],
        "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    assert asked_from(inferring("x", parameters=given), LIMITS).request == inference_pb2.GenerateRequest(
        model="synthetic",
        prompt="x",
        sampling=inference_pb2.Sampling(
            temperature=0.5, top_p=0.75, top_k=3, min_p=0.25, presence_penalty=1, frequency_penalty=2,
            repetition_penalty=1.5, n=2, seed=(1 << 64) - 1, logit_bias={5: 1.5}, allowed_token_ids=[1, 2],
            bad_words=["bad"],
        ),
        stopping=inference_pb2.Stopping(
            max_tokens=7, min_tokens=2, ignore_eos=True, stop=["end"], stop_token_ids=[4],
            include_stop_in_output=True,
        ),
        output=inference_pb2.Output(special_tokens=True),
    )  # fmt: skip


def test_a_parameter_that_is_not_given_has_what_the_model_recommends() -> None:
    limits = replace(LIMITS, recommended=inference_pb2.Sampling(temperature=0.5, top_k=20))
    for given, temperature, top_k in (({}, 0.5, 20), ({"temperature": 0, "top_k": -1}, 0.0, 0)):
        ours = asked_from(inferring(parameters=given), limits).request
        sampling = validate_generate(ours, limits).sampling
        assert (sampling.temperature, sampling.top_k) == (temperature, top_k)
    assert not asked_from(inferring(parameters={}), LIMITS).request.sampling.HasField("temperature")


def test_parameters_of_the_request_count_too_and_the_tensor_counts_more() -> None:
    request = inferring(parameters={"max_tokens": 3})
    request.parameters["max_tokens"].int64_param = 9
    request.parameters["temperature"].double_param = 0.25
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    ours = asked_from(request, LIMITS).request
    assert (ours.stopping.max_tokens, ours.sampling.temperature) == (3, 0.25)
    request.parameters["priority"].uint64_param = 1
    with pytest.raises(Unimplemented, match=r"parameters\.priority"):
        asked_from(request, LIMITS)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ("[]", "sampling_parameters"),
        ("[" * 100_000, "sampling_parameters"),
        ('{"temperature": NaN}', "sampling_parameters"),
        ('{"temperature": "hot"}', "sampling_parameters.temperature"),
        ('{"temperature": true}', "sampling_parameters.temperature"),
        ('{"temperature": ' + "9" * 4000 + "}", "sampling_parameters.temperature"),
        ('{"max_tokens": 1.5}', "sampling_parameters.max_tokens"),
        ('{"max_tokens": -1}', "sampling_parameters.max_tokens"),
        ('{"max_tokens": 1e300}', "sampling_parameters.max_tokens"),
        ('{"max_tokens": ' + "9" * 4000 + "}", "sampling_parameters.max_tokens"),
        ('{"seed": "' + "9" * 5000 + '"}', "sampling_parameters.seed"),
        ('{"ignore_eos": 1}', "sampling_parameters.ignore_eos"),
        ('{"stop": [1]}', "sampling_parameters.stop[0]"),
        ('{"stop": "\\ud800"}', "sampling_parameters.stop"),
        ('{"stop": {"a": 1}}', "sampling_parameters.stop"),
        ('{"stop_token_ids": [' + "1," * 64 + "1]}", "sampling_parameters.stop_token_ids"),
        ('{"logit_bias": {"a": 1}}', "sampling_parameters.logit_bias"),
        ('{"logit_bias": {"1": "a"}}', "sampling_parameters.logit_bias.1"),
        ('{"\\ud800": 1}', "sampling_parameters.?"),
        ('{"' + "x" * 100_000 + '": 1}', "sampling_parameters.?"),
        ('{"a": "' + "x" * 300_000 + '"}', "sampling_parameters"),
    ],
)
def test_bad_sampling_parameters_are_named(parameters: str, field: str) -> None:
    with pytest.raises(PagodaError) as caught:
        asked_from(inferring(parameters=parameters), LIMITS)
    assert isinstance(caught.value, InvalidArgument | Unimplemented)
    assert caught.value.field == field
    assert len(caught.value.message) < 300


def changed(**fields: Any) -> kserve.ModelInferRequest:
    """A request whose first tensor is another one."""
    request = kserve.ModelInferRequest()
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"x"]}}
    request.inputs.add(**{name: value for name, value in (tensor | fields).items() if value is not None})
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (kserve.ModelInferRequest(), "text_input"),
        (changed(name="image"), "inputs.image"),
        (changed(datatype="FP32"), "text_input"),
        (changed(shape=[2]), "text_input"),
        (changed(shape=[]), "text_input"),
        (changed(contents=None), "text_input"),
        (changed(contents={"bytes_contents": [b"x", b"y"]}), "text_input"),
        (changed(contents={"bytes_contents": [b"\xff"]}), "text_input"),
        (changed(parameters={"shared_memory_region": {"string_param": "x"}}), "inputs.text_input.parameters"),
        (kserve.ModelInferRequest(inputs=[*changed().inputs] * 2), "text_input"),
        (kserve.ModelInferRequest(inputs=changed().inputs, raw_input_contents=[b"x", b"y"]), "raw_input_contents"),
        (kserve.ModelInferRequest(inputs=changed().inputs, raw_input_contents=[b"\1\0\0\0x"]), "text_input"),
        (
            kserve.ModelInferRequest(inputs=changed(contents=None).inputs, raw_input_contents=[b"\2\0\0\0x"]),
            "text_input",
        ),
        (kserve.ModelInferRequest(inputs=changed().inputs, outputs=[{"name": "logprobs"}]), "outputs.logprobs"),
        (inferring(stream=True, exclude_input_in_output=False), "exclude_input_in_output"),
    ],
)
def test_a_bad_tensor_is_named(request_: kserve.ModelInferRequest, field: str) -> None:
    with pytest.raises(PagodaError) as caught:
        asked_from(request_, LIMITS)
    assert isinstance(caught.value, InvalidArgument | Unimplemented)
    assert caught.value.field == field
