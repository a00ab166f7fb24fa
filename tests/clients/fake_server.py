"""A server on a real socket that answers as told and records its requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagoda.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    trace_pb2,
)

Behaviour = Callable[[Message, grpc.ServicerContext], Iterator[Message]]


@dataclass
class FakeServer(inference_pb2_grpc.InferenceServicer, control_pb2_grpc.ControlServicer, admin_pb2_grpc.AdminServicer):
    """behaviours: one per call, the last for all further calls; `ended`: a stream has ended, for any reason."""

    behaviours: list[Behaviour] = field(default_factory=lambda: [answer("Hello", " world")])
    requests: list[Message] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    remaining_s: list[float | None] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    address: str = ""
    num_engines: int = 1
    load: control_pb2.Load | None = None
    state: control_pb2.ServerState = control_pb2.SERVER_STATE_SERVING

    def Generate(self, request, context):
        self._note(request, context)
        context.add_callback(self.ended.set)
        yield from self._next_behaviour()(request, context)

    def Tokenize(self, request, context):
        ids = (request.prompt or request.message).encode()
        return self._unary(request, context, lambda: inference_pb2.TokenizeResponse(token_ids=ids))

    def Detokenize(self, request, context):
        text = bytes(request.token_ids).decode()
        return self._unary(request, context, lambda: inference_pb2.DetokenizeResponse(text=text))

    def Embed(self, request, context):
        vector = inference_pb2.Embedding(values=[0.5, -0.25])
        return self._unary(
            request, context, lambda: inference_pb2.EmbedResponse(embeddings=[vector] * len(request.inputs))
        )

    def Score(self, request, context):
        token = inference_pb2.Token(id=7, logprob=-0.5, bytes=b"x" if request.token_bytes else b"")
        score = inference_pb2.ContinuationScore(logprob=-0.5, tokens=[token])
        return self._unary(
            request, context, lambda: inference_pb2.ScoreResponse(scores=[score] * len(request.continuations))
        )

    def GetServerInfo(self, request, context):
        engine = control_pb2.EngineInfo(device="cpu", max_model_len=8192, max_num_seqs=64)
        engines = [
            control_pb2.EngineStatus(engine=0, state=control_pb2.ENGINE_STATE_READY, restarts=2, info=engine),
            control_pb2.EngineStatus(engine=1, state=control_pb2.ENGINE_STATE_LOADING),
        ]
        info = control_pb2.ServerInfo(
            version="1.2.3", model="fake", state=self.state, engines=engines[: self.num_engines]
        )
        return self._unary(request, context, lambda: info)

    def ListModels(self, request, context):
        abilities = [control_pb2.CAPABILITY_GENERATE, control_pb2.CAPABILITY_EMBED]
        models = [control_pb2.ModelInfo(name="fake", max_model_len=8192, capabilities=abilities)]
        return self._unary(request, context, lambda: control_pb2.ListModelsResponse(models=models))

    def GetLoad(self, request, context):
        tenants = [control_pb2.TenantLoad(name=name, share=share) for name, share in (("ann", 0.7), ("", 0.2))]
        engine = control_pb2.EngineLoad(
            running=3,
            waiting=1,
            blocks_total=100,
            blocks_referenced=25,
            host_blocks_total=64,
            host_blocks_used=12,
            saved_tokens=900,
            loaded_tokens=700,
            drafted_tokens=40,
            accepted_tokens=30,
            forced_tokens=7,
        )
        engines = [engine, control_pb2.EngineLoad(engine=1, running=6)]
        load = control_pb2.Load(requests=4, engines=engines[: self.num_engines], tenants=tenants, num_tenants=5)
        return self._unary(request, context, lambda: self.load or load)

    def WatchLoad(self, request, context):
        self._note(request, context)
        context.add_callback(self.ended.set)
        running = 0
        while context.is_active():
            yield control_pb2.Load(requests=running)
            running += 1

    def Abort(self, request, context):
        return self._unary(request, context, admin_pb2.AbortResponse)

    def Drain(self, request, context):
        return self._unary(request, context, admin_pb2.DrainResponse)

    def FlushCache(self, request, context):
        return self._unary(request, context, lambda: admin_pb2.FlushCacheResponse(freed_blocks=7))

    def GetStepTrace(self, request, context):
        self._note(request, context)
        yield trace_pb2.StepTracePart(engine=1, taken_at_s=5.0)

    def _note(self, request: Message, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append({key: value for key, value in context.invocation_metadata() if isinstance(value, str)})
        self.remaining_s.append(context.time_remaining())
        self.begun.set()

    def _next_behaviour(self) -> Behaviour:
        return self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]

    def _unary(self, request: Message, context: grpc.ServicerContext, response: Callable[[], Message]) -> Message:
        """Fail this call if its behaviour fails; otherwise answer it."""
        self._note(request, context)
        for _ in self._next_behaviour()(request, context):
            break
        return response()


def answer(*deltas: str, reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_STOP) -> Behaviour:
    """One token per delta with ids 0, 1, 2, …, then the end."""

    def behave(request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
        for i, delta in enumerate(deltas):
            token = inference_pb2.Token(id=i, logprob=-0.5, top=[inference_pb2.TopToken(id=i, logprob=-0.5)])
            event = inference_pb2.Tokens(tokens=[token], text=delta)
            yield inference_pb2.GenerateResponse(request_id="r", tokens=event)
        yield inference_pb2.GenerateResponse(
            request_id="r",
            finished=inference_pb2.Finished(reason=reason, stop_string="."),
            usage=inference_pb2.Usage(prompt_tokens=5, completion_tokens=len(deltas), cached_tokens=1),
            timing=inference_pb2.Timing(queue_s=0.25, total_s=1.5),
        )

    return behave


def answer_without_end(request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
    """Send tokens until the client leaves."""
    while context.is_active():
        yield inference_pb2.GenerateResponse(tokens=inference_pb2.Tokens(text="more "))


def silence(request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
    """Send nothing until the client leaves."""
    gone = threading.Event()
    context.add_callback(gone.set)
    gone.wait(30)
    return
    yield


def fail(code: grpc.StatusCode, message: str = "told to fail", *details: Message, after: int = 0) -> Behaviour:
    """End the call with this status and google.rpc details, after a number of messages."""

    def behave(request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
        for _ in range(after):
            yield inference_pb2.GenerateResponse(tokens=inference_pb2.Tokens(text="begun"))
        packed = []
        for detail in details:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        status = status_pb2.Status(code=code.value[0], message=message, details=packed)
        context.abort_with_status(rpc_status.to_status(status))

    return behave


def retry_after(delay_s: float) -> error_details_pb2.RetryInfo:
    delay = Duration()
    delay.FromNanoseconds(round(delay_s * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


@contextmanager
def running(fake: FakeServer, address: str = "127.0.0.1:0") -> Iterator[FakeServer]:
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    inference_pb2_grpc.add_InferenceServicer_to_server(fake, server)
    control_pb2_grpc.add_ControlServicer_to_server(fake, server)
    admin_pb2_grpc.add_AdminServicer_to_server(fake, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port(address)}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(grace=None).wait()
