"""KServe's Open Inference Protocol for text, with the tensors of Triton's vLLM backend: what `tritonclient` speaks."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeAlias

import grpc

from pagoda.v1 import control_pb2, inference_pb2
from pagoda_server import installed_version
from pagoda_server.router.adapters.protocols import kserve_pb2 as kserve
from pagoda_server.router.adapters.translation import REASONS, Context, Translation, named
from pagoda_server.router.errors import InvalidArgument, NotFound, ResourceExhausted, Unimplemented, to_status
from pagoda_server.router.request.admission import Admission
from pagoda_server.router.request.fields import Limits, check_count, check_integer, check_size
from pagoda_server.router.request.inference import InferenceServicer
from pagoda_server.router.request.output import ClientWriter
from pagoda_server.router.request.receiving import from_protobuf
from pagoda_server.router.request.validation import check_model
from pagoda_server.router.tenants.caller import caller

SERVICE = "inference.GRPCInferenceService"
VERSION = "1"  # of the model: there is only this one
MAX_STREAMS = 64  # calls of ModelStreamInfer at once; each may hold a message that is being read
MAX_IN_FLIGHT = 32  # requests of one stream
IDLE_S = 600.0  # that a stream may have no request in flight
MAX_TENSORS = 16
MAX_PARAMETERS = 64
MAX_DIMENSIONS = 8

# Input tensors, each of one value, and output tensors, each of as many values as there are sequences.
INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
_FLOATS = {"temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
_UINT32, _UINT64 = (1 << 32) - 1, (1 << 64) - 1
_WITHOUT_EFFECT = {"triton_enable_empty_final_response", "binary_data_output"}  # of clients, in `parameters`
_FINAL = "triton_final_response"

Json: TypeAlias = Any


def most_entries(limits: Limits) -> Mapping[str, int]:
    """Limits of a request's repeated fields, by full name."""
    request = "inference.ModelInferRequest"
    return {
        f"{request}.inputs": MAX_TENSORS,
        f"{request}.outputs": MAX_TENSORS,
        f"{request}.raw_input_contents": MAX_TENSORS,
        f"{request}.parameters": MAX_PARAMETERS,
        f"{request}.InferInputTensor.shape": MAX_DIMENSIONS,
        f"{request}.InferInputTensor.parameters": MAX_PARAMETERS,
        f"{request}.InferRequestedOutputTensor.parameters": MAX_PARAMETERS,
        "inference.InferTensorContents.bool_contents": MAX_TENSORS,
        "inference.InferTensorContents.bytes_contents": MAX_TENSORS,
    }


_INFER = from_protobuf(kserve.ModelInferRequest, most_entries)


class GrpcInferenceService:
    """The service. Streams are admitted by their number, and each of their requests like any other."""

    service = SERVICE
    admitted: Sequence[str] = ("ModelInfer",)

    def __init__(
        self,
        *,
        model: str,
        inference: InferenceServicer,
        state: Callable[[], control_pb2.ServerState],
        stall_timeout_s: float,
    ) -> None:
        self._model = model
        self._inference = inference
        self._state = state
        self._stall_timeout_s = stall_timeout_s
        self._streams = Admission(MAX_STREAMS, max_tokens=1)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        unary = grpc.unary_unary_rpc_method_handler
        return {
            "ServerLive": unary(
                self._live, kserve.ServerLiveRequest.FromString, kserve.ServerLiveResponse.SerializeToString
            ),
            "ServerReady": unary(
                self._ready, kserve.ServerReadyRequest.FromString, kserve.ServerReadyResponse.SerializeToString
            ),
            "ModelReady": unary(
                self._model_ready, kserve.ModelReadyRequest.FromString, kserve.ModelReadyResponse.SerializeToString
            ),
            "ServerMetadata": unary(
                self._metadata, kserve.ServerMetadataRequest.FromString, kserve.ServerMetadataResponse.SerializeToString
            ),
            "ModelMetadata": unary(
                self._model_metadata,
                kserve.ModelMetadataRequest.FromString,
                kserve.ModelMetadataResponse.SerializeToString,
            ),
            "ModelInfer": grpc.stream_unary_rpc_method_handler(
                self._infer, None, kserve.ModelInferResponse.SerializeToString
            ),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
                self._stream_infer, None, kserve.ModelStreamInferResponse.SerializeToString
            ),
        }

    @property
    def _is_ready(self) -> bool:
        return self._state() == control_pb2.SERVER_STATE_SERVING

    async def _live(self, request: kserve.ServerLiveRequest, context: Context) -> kserve.ServerLiveResponse:
        return kserve.ServerLiveResponse(live=True)

    async def _ready(self, request: kserve.ServerReadyRequest, context: Context) -> kserve.ServerReadyResponse:
        return kserve.ServerReadyResponse(ready=self._is_ready)

    async def _model_ready(self, request: kserve.ModelReadyRequest, context: Context) -> kserve.ModelReadyResponse:
        is_served = request.name == self._model and request.version in ("", VERSION)
        return kserve.ModelReadyResponse(ready=is_served and self._is_ready)

    async def _metadata(self, request: kserve.ServerMetadataRequest, context: Context) -> kserve.ServerMetadataResponse:
        return kserve.ServerMetadataResponse(name="pagoda", version=installed_version())

    async def _model_metadata(
        self, request: kserve.ModelMetadataRequest, context: Context
    ) -> kserve.ModelMetadataResponse:
        check_model(request.name, self._model)
        _check_version(request.version)
        tensor = kserve.ModelMetadataResponse.TensorMetadata
        return kserve.ModelMetadataResponse(
            name=self._model,
            versions=[VERSION],
            platform="pagoda",
            inputs=[tensor(name=name, datatype=kind, shape=[1]) for name, kind in INPUTS.items()],
            outputs=[tensor(name=name, datatype=kind, shape=[-1]) for name, kind in OUTPUTS.items()],
        )

    async def _infer(self, _: object, context: Context) -> kserve.ModelInferResponse:
        inferred: list[kserve.ModelInferResponse] = []

        async def keep(response: kserve.ModelInferResponse) -> None:
            inferred.append(response)

        await _Inference(context, keep, can_stream=False).run(self._inference)
        return inferred[0]

    async def _stream_infer(self, _: object, context: Context) -> None:
        with self._streams.reserve(caller().tenant) as reservation:
            reservation.starts()
            await _Stream(context, self._inference, self._stall_timeout_s).run()


class _Stream:
    """A call of ModelStreamInfer: answers its requests side by side."""

    def __init__(self, context: Context, inference: InferenceServicer, stall_timeout_s: float) -> None:
        self._context = context
        self._inference = inference
        self._stall_timeout_s = stall_timeout_s
        self._places = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._num_in_flight = 0
        self._idle = asyncio.timeout(IDLE_S)
        self._writing = asyncio.Lock()
        self._is_broken = False  # a write failed, or did not end in time

    async def run(self) -> None:
        """Answer until the client ends its side. Raises the error that ends the stream itself."""
        try:
            async with self._idle, asyncio.TaskGroup() as answers:
                while True:
                    await self._places.acquire()
                    if (raw := await self._context.read()) is grpc.aio.EOF:
                        self._is_idle(False)
                        self._num_in_flight += 1  # this loop, for good: the stream is not idle any more
                        return
                    self._num_in_flight += 1
                    self._is_idle(False)
                    answers.create_task(self._answer(raw))
        except TimeoutError:
            raise ResourceExhausted(f"the stream has been idle for {IDLE_S:g} s", reason="SENDER_STALLED") from None
        except BaseExceptionGroup as failures:  # the first one has cancelled the others
            raise failures.exceptions[0] from None

    def _is_idle(self, is_idle: bool) -> None:
        self._idle.reschedule(asyncio.get_running_loop().time() + IDLE_S if is_idle else None)

    async def _answer(self, raw: bytes) -> None:
        """Answer one request. Raises only what ends the stream."""
        request = _Inference(self._context, self._respond, raw, can_stream=True)
        try:
            if (why := self._inference.refusal(caller().tenant)) is not None:
                self._inference.refused(request, why, f"{SERVICE}/ModelStreamInfer")
                raise why
            await request.run(self._inference)
        except Exception as error:
            if self._is_broken:
                raise
            failed = kserve.ModelStreamInferResponse(error_message=to_status(error).details)
            failed.infer_response.id = request.id
            async with ClientWriter(self, self._stall_timeout_s) as writer:  # type: ignore[arg-type]
                await writer.write(failed)  # type: ignore[arg-type]
        finally:
            self._places.release()
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._is_idle(True)

    async def _respond(self, response: kserve.ModelInferResponse) -> None:
        await self.write(kserve.ModelStreamInferResponse(infer_response=response))

    async def write(self, response: kserve.ModelStreamInferResponse) -> None:
        """Write a response. Requests that end while another one's write is stuck fail with it."""
        async with self._writing:
            if self._is_broken:
                raise ResourceExhausted("the stream is broken", reason="READER_STALLED")
            try:
                await self._context.write(response)
            except BaseException:
                self._is_broken = True
                raise


class _Inference(Translation):
    """One request.

    respond     takes its responses
    can_stream  whether there may be several
    """

    names: ClassVar = {
        "prompt": "text_input",
        "sampling.": "sampling_parameters.",
        "stopping.": "sampling_parameters.",
        "output.": "sampling_parameters.",
    }

    def __init__(
        self,
        context: Context,
        respond: Callable[[kserve.ModelInferResponse], Awaitable[None]],
        raw: bytes | None = None,
        *,
        can_stream: bool,
    ) -> None:
        super().__init__(context, f"{SERVICE}/{'ModelStreamInfer' if can_stream else 'ModelInfer'}", raw)
        self.id = ""
        self._respond = respond
        self._can_stream = can_stream
        self._texts: list[list[str]] = []
        self._counts: list[int] = []
        self._reasons: list[str] = []

    def request(self, raw: bytes, limits: Limits) -> inference_pb2.GenerateRequest:
        theirs = _INFER(raw, limits)
        if len(theirs.id) > limits.max_request_id:
            raise InvalidArgument("id", f"has {len(theirs.id)} characters, at most {limits.max_request_id}")
        self.id = theirs.id
        self._asked = asked = asked_from(theirs, limits)
        if asked.streams and not self._can_stream:
            raise InvalidArgument("stream", "is true; ModelStreamInfer streams")
        # As many as are asked for, if that is allowed: nothing is written otherwise.
        n = min(asked.request.sampling.n, limits.max_n)
        self._texts = [[asked.prefix] for _ in range(n)]
        self._counts, self._reasons = [0] * n, ["None"] * n
        self._model = theirs.model_name
        return asked.request

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        if message.HasField("tokens"):
            index, text = message.tokens.index, message.tokens.text
            self._counts[index] += len(message.tokens.tokens)
            if text:
                self._texts[index].append(text)
                if self._asked.streams:
                    await self._respond(self._response(None))
        elif message.HasField("finished"):
            self._reasons[message.finished.index] = REASONS.get(message.finished.reason, "None")
        if message.HasField("usage"):
            await self._respond(self._response(message.usage))

    def _response(self, usage: inference_pb2.Usage | None) -> kserve.ModelInferResponse:
        """The text since the last response. With `usage` it is the last one."""
        response = kserve.ModelInferResponse(model_name=self._model, model_version=VERSION, id=self.id)
        if self._can_stream:
            response.parameters[_FINAL].bool_param = usage is not None
        for name in self._asked.outputs:
            match name:
                case "text_output":
                    _add(response, name, ["".join(text) for text in self._texts])
                case "finish_reason":
                    _add(response, name, self._reasons)
                case "num_input_tokens" if usage is not None:
                    _add(response, name, [usage.prompt_tokens])
                case "num_output_tokens" if usage is not None:
                    _add(response, name, self._counts)
        for text in self._texts:
            text.clear()
        return response


def _add(response: kserve.ModelInferResponse, name: str, values: Sequence[str] | Sequence[int]) -> None:
    response.outputs.add(name=name, datatype=OUTPUTS[name], shape=[len(values)])
    parts: list[bytes] = []
    for value in values:
        if isinstance(value, str):
            content = value.encode()
            parts += (struct.pack("<I", len(content)), content)
        else:
            parts.append(struct.pack("<I", value))
    response.raw_output_contents.append(b"".join(parts))


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, translated.

    prefix   what the text begins with
    outputs  the tensors to return
    """

    request: inference_pb2.GenerateRequest
    streams: bool
    prefix: str
    outputs: tuple[str, ...]


def asked_from(theirs: kserve.ModelInferRequest, limits: Limits) -> Asked:
    """Translate a request. Raises InvalidArgument, Unimplemented, which name its tensors; NotFound for a version."""
    _check_version(theirs.model_version)
    tensors = _tensors(theirs)
    if (prompt := tensors.texts.get("text_input")) is None:
        raise InvalidArgument("text_input", "is missing")
    check_size(len(prompt.encode()), "text_input", limits.max_text_bytes)
    streams = tensors.flags.get("stream", False)
    excludes_input = tensors.flags.get("exclude_input_in_output", streams)
    if streams and not excludes_input:
        raise InvalidArgument("exclude_input_in_output", "is false, which a stream cannot be")
    ours = inference_pb2.GenerateRequest(model=theirs.model_name, prompt=prompt)
    if not limits.recommended.HasField("temperature"):
        ours.sampling.temperature = 1.0  # vLLM's default
    ours.sampling.n = 1
    check_count(len(theirs.parameters), "parameters", MAX_PARAMETERS)
    for key, parameter in theirs.parameters.items():
        if key not in _WITHOUT_EFFECT and (kind := parameter.WhichOneof("parameter_choice")) is not None:
            _Parameter(f"parameters.{named(key)}", getattr(parameter, kind), limits).put(key, ours)
    for key, value in _json_object(tensors.texts.get("sampling_parameters", "{}"), limits).items():
        if value is not None:
            _Parameter(f"sampling_parameters.{named(key)}", value, limits).put(key, ours)
    return Asked(ours, streams, "" if excludes_input else prompt, _outputs(theirs, tensors.flags))


def _check_version(version: str) -> None:
    if version not in ("", VERSION):
        raise NotFound(f"model_version: not served here; the served version is {VERSION}")


def _outputs(theirs: kserve.ModelInferRequest, flags: Mapping[str, bool]) -> tuple[str, ...]:
    check_count(len(theirs.outputs), "outputs", MAX_TENSORS)
    for output in theirs.outputs:
        if output.name not in OUTPUTS:
            raise Unimplemented(f"outputs.{named(output.name)}")
        if output.parameters:
            raise Unimplemented(f"outputs.{output.name}.parameters")
    asked = {output.name for output in theirs.outputs} or {"text_output"}
    return tuple(name for name in OUTPUTS if name in asked or flags.get(f"return_{name}", False))


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The values of a request's input tensors, by name."""

    texts: dict[str, str]
    flags: dict[str, bool]


def _tensors(theirs: kserve.ModelInferRequest) -> _Tensors:
    check_count(len(theirs.inputs), "inputs", MAX_TENSORS)
    raw = theirs.raw_input_contents
    if raw and len(raw) != len(theirs.inputs):
        raise InvalidArgument("raw_input_contents", f"has {len(raw)} entries for {len(theirs.inputs)} inputs")
    tensors = _Tensors({}, {})
    for at, tensor in enumerate(theirs.inputs):
        name = tensor.name
        if (kind := INPUTS.get(name)) is None:
            raise Unimplemented(f"inputs.{named(name)}")
        if tensor.datatype != kind:
            raise InvalidArgument(name, f"has the datatype {named(tensor.datatype)}, must have {kind}")
        if tensor.parameters:
            raise Unimplemented(f"inputs.{name}.parameters")
        if not 1 <= len(tensor.shape) <= MAX_DIMENSIONS or any(size != 1 for size in tensor.shape):
            raise InvalidArgument(name, "must have the shape [1]")
        if name in tensors.texts or name in tensors.flags:
            raise InvalidArgument(name, "is given twice")
        if raw and tensor.HasField("contents"):
            raise InvalidArgument(name, "has contents besides raw_input_contents")
        if kind == "BYTES":
            tensors.texts[name] = _text_in(name, raw[at] if raw else None, tensor.contents)
        else:
            tensors.flags[name] = _flag_in(name, raw[at] if raw else None, tensor.contents)
    return tensors


def _text_in(name: str, raw: bytes | None, contents: kserve.InferTensorContents) -> str:
    if raw is not None:
        if len(raw) < 4 or int.from_bytes(raw[:4], "little") != len(raw) - 4:
            raise InvalidArgument(name, "must hold one value: its length in four bytes, and it")
        value = raw[4:]
    elif len(contents.bytes_contents) == 1:
        value = contents.bytes_contents[0]
    else:
        raise InvalidArgument(name, f"has {len(contents.bytes_contents)} values, must have 1")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(name, "is not UTF-8") from None


def _flag_in(name: str, raw: bytes | None, contents: kserve.InferTensorContents) -> bool:
    if raw is not None:
        if raw not in (b"\0", b"\1"):
            raise InvalidArgument(name, "must hold one byte, 0 or 1")
        return raw == b"\1"
    if len(contents.bool_contents) != 1:
        raise InvalidArgument(name, f"has {len(contents.bool_contents)} values, must have 1")
    return contents.bool_contents[0]


def _json_object(text: str, limits: Limits) -> dict[str, Json]:
    field = "sampling_parameters"
    check_size(len(text.encode()), field, limits.max_json_bytes)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidArgument(field, "is nested too deep") from None
    except ValueError:
        raise InvalidArgument(field, "is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidArgument(field, "is JSON but not an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A sampling parameter by vLLM's name. Strings may stand for numbers and booleans, as in Triton's examples."""

    field: str
    value: Json
    limits: Limits

    def put(self, key: str, ours: inference_pb2.GenerateRequest) -> None:
        """Set it in our request. Raises InvalidArgument, Unimplemented."""
        sampling, stopping = ours.sampling, ours.stopping
        match key:
            case _ if key in _FLOATS:
                setattr(sampling, key, self._number())
            case "top_k":
                sampling.top_k = max(0, self._integer(-1, _UINT32))  # vLLM's -1 keeps all, as our 0 does
            case "n":
                sampling.n = self._integer(0, _UINT32)
            case "seed":
                sampling.seed = self._integer(-(1 << 63), _UINT64) % (1 << 64)
            case "logit_bias":
                sampling.logit_bias.update(self._biases())
            case "allowed_token_ids":
                sampling.allowed_token_ids.extend(self._ids(self.limits.vocab_size))
            case "bad_words":
                sampling.bad_words.extend(self._texts(self.limits.max_bad_words))
            case "max_tokens":
                stopping.max_tokens = self._integer(0, _UINT32)
            case "min_tokens":
                stopping.min_tokens = self._integer(0, _UINT32)
            case "stop":
                stopping.stop.extend(self._texts(self.limits.max_stop))
            case "stop_token_ids":
                stopping.stop_token_ids.extend(self._ids(self.limits.max_stop_ids))
            case "ignore_eos":
                stopping.ignore_eos = self._flag()
            case "include_stop_str_in_output":
                stopping.include_stop_in_output = self._flag()
            case "skip_special_tokens":
                ours.output.special_tokens = not self._flag()
            case _:
                raise Unimplemented(self.field)

    def _number(self) -> float:
        try:
            if isinstance(self.value, int | float | str) and not isinstance(self.value, bool):
                return float(self.value)
        except (ValueError, OverflowError):
            pass
        raise InvalidArgument(self.field, "is not a number")

    def _integer(self, low: int, high: int) -> int:
        number: Json = self.value
        try:
            if isinstance(number, str):
                number = int(number)
        except ValueError:
            number = None
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if not isinstance(number, int) or isinstance(number, bool):
            raise InvalidArgument(self.field, "is not a whole number")
        if abs(number) > _UINT64:  # too long to be repeated
            raise InvalidArgument(self.field, f"must be from {low} to {high}")
        check_integer(number, self.field, low, high)
        return number

    def _flag(self) -> bool:
        if isinstance(self.value, bool):
            return self.value
        if isinstance(self.value, str) and self.value.lower() in ("true", "false"):
            return self.value.lower() == "true"
        raise InvalidArgument(self.field, "is neither true nor false")

    def _list(self, most: int) -> list[_Parameter]:
        if not isinstance(self.value, list):
            raise InvalidArgument(self.field, "is not a list")
        check_count(len(self.value), self.field, most)
        return [_Parameter(f"{self.field}[{at}]", value, self.limits) for at, value in enumerate(self.value)]

    def _ids(self, most: int) -> list[int]:
        return [each._integer(0, _UINT32) for each in self._list(most)]

    def _texts(self, most: int) -> list[str]:
        if isinstance(self.value, str):
            return [self._text()]
        return [each._text() for each in self._list(most)]

    def _text(self) -> str:
        if not isinstance(self.value, str):
            raise InvalidArgument(self.field, "is not a text")
        if any("\ud800" <= each <= "\udfff" for each in self.value):
            raise InvalidArgument(self.field, "holds half a character")
        return self.value

    def _biases(self) -> dict[int, float]:
        if not isinstance(self.value, dict):
            raise InvalidArgument(self.field, "is not an object")
        check_count(len(self.value), self.field, self.limits.max_logit_bias)
        return {
            _Parameter(self.field, id, self.limits)._integer(0, _UINT32): _Parameter(
                f"{self.field}.{named(id)}", bias, self.limits
            )._number()
            for id, bias in self.value.items()
        }
