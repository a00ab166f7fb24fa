"""KServe's Open Inference Protocol for text, with the tensors of Triton's vLLM backend: what `tritonclient` speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

import grpc

from pagoda.v1 import control_pb2, inference_pb2

from ... import installed_version
from ..errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable, to_status
from ..request.admission import Admission
from ..request.client_call import Context
from ..request.fields import Limits
from ..request.inference import InferenceServicer
from ..request.output import ClientWriter
from ..request.receiving import from_protobuf
from ..tenants.caller import caller
from .kserve_tensors import (
    INPUTS,
    OUTPUTS,
    VERSION,
    add_output,
    asked_from,
    check_version,
    most_entries,
)
from .protocols import kserve_pb2 as kserve
from .translation import REASONS, Translation

SERVICE = "inference.GRPCInferenceService"
MAX_STREAMS = 64  # calls of ModelStreamInfer at once; each may hold a message that is being read
MAX_IN_FLIGHT = 32  # requests of one stream
IDLE_S = 600.0  # that a stream may have no request in flight
_FINAL = "triton_final_response"

_INFER = from_protobuf(kserve.ModelInferRequest, most_entries)


class GrpcInferenceService:
    """The service. Streams are admitted by their number, and each of their requests like any other."""

    service = SERVICE
    admitted: Sequence[str] = ("ModelInfer",)

    def __init__(
        self,
        *,
        inference: InferenceServicer,
        state: Callable[[], control_pb2.ServerState],
        stall_timeout_s: float,
    ) -> None:
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
        try:
            self._inference.services.check_takes(self._inference.models.named(request.name))
        except (NotFound, Unavailable):
            return kserve.ModelReadyResponse(ready=False)
        is_known = bool(request.name) and request.version in ("", VERSION)
        return kserve.ModelReadyResponse(ready=is_known and self._is_ready)

    async def _metadata(self, request: kserve.ServerMetadataRequest, context: Context) -> kserve.ServerMetadataResponse:
        return kserve.ServerMetadataResponse(name="pagoda", version=installed_version())

    async def _model_metadata(
        self, request: kserve.ModelMetadataRequest, context: Context
    ) -> kserve.ModelMetadataResponse:
        model = self._inference.models.named(request.name)
        check_version(request.version)
        tensor = kserve.ModelMetadataResponse.TensorMetadata
        return kserve.ModelMetadataResponse(
            name=model.name,
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
        "guided.json_schema": "sampling_parameters.structured_outputs.json",
        "guided.ebnf_grammar": "sampling_parameters.structured_outputs.grammar",
        "guided.choice.options": "sampling_parameters.structured_outputs.choice",
        "guided.": "sampling_parameters.structured_outputs.",
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
                    add_output(response, name, ["".join(text) for text in self._texts])
                case "finish_reason":
                    add_output(response, name, self._reasons)
                case "num_input_tokens" if usage is not None:
                    add_output(response, name, [usage.prompt_tokens])
                case "num_output_tokens" if usage is not None:
                    add_output(response, name, self._counts)
        for text in self._texts:
            text.clear()
        return response
