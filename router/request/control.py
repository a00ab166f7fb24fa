"""The Control service: looking at a running server, and steering it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
from google.protobuf.duration_pb2 import Duration

from pagoda.v1 import control_pb2, control_pb2_grpc
from pagoda_server import installed_version
from pagoda_server.router.engines.dispatch import Dispatcher
from pagoda_server.router.engines.tenant_loads import add_tenants
from pagoda_server.router.errors import InvalidArgument, Unavailable
from pagoda_server.router.process.state import ServingState
from pagoda_server.router.request.admission import Admission
from pagoda_server.router.request.limits import Limits
from pagoda_server.router.request.live import LiveRequests
from pagoda_server.router.request.validation import check_model
from pagoda_server.router.text.tokenizer import Tokenizer

MIN_WATCH_INTERVAL_S = 0.05
MAX_WATCH_INTERVAL_S = 3600.0


class ControlServicer(control_pb2_grpc.ControlServicer):
    def __init__(
        self,
        *,
        model: str,
        tokenizer: Tokenizer,
        limits: Callable[[], Limits],
        admission: Admission,
        dispatcher: Dispatcher,
        live: LiveRequests,
        state: ServingState,
        engine_restarts: Callable[[], int],
        max_message_bytes: int,
        settings: dict[str, str],
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits
        self._admission = admission
        self._dispatcher = dispatcher
        self._live = live
        self._state = state
        self._engine_restarts = engine_restarts
        self._max_message_bytes = max_message_bytes
        self._settings = settings
        self._started = time.monotonic()

    async def GetServerInfo(
        self,
        request: control_pb2.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[control_pb2.GetServerInfoRequest, control_pb2.ServerInfo],
    ) -> control_pb2.ServerInfo:
        limits = self._limits()
        uptime = Duration()
        uptime.FromMilliseconds(round(1e3 * (time.monotonic() - self._started)))
        ready = self._dispatcher.ready
        return control_pb2.ServerInfo(
            version=installed_version(),
            model=self._model,
            engine_state=self._state.engine_state,
            engine=ready[0].info if ready else None,
            limits=control_pb2.Limits(
                max_requests=self._admission.max_requests,
                max_queued_tokens=self._admission.max_tokens,
                max_text_bytes=limits.max_text_bytes,
                max_sequences_per_request=limits.max_n,
                max_logprobs=limits.max_logprobs,
                max_stop_strings=limits.max_stop,
                max_message_bytes=self._max_message_bytes,
            ),
            uptime=uptime,
            engine_restarts=self._engine_restarts(),
            settings=self._settings | {"max_queued_tokens": str(self._admission.max_tokens)},
        )

    async def GetModelInfo(
        self,
        request: control_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[control_pb2.GetModelInfoRequest, control_pb2.ModelInfo],
    ) -> control_pb2.ModelInfo:
        check_model(request.model, self._model)
        if not (ready := self._dispatcher.ready):
            raise Unavailable("the engine is loading or being restarted")
        info, limits = ready[0].info, self._limits()
        assert info is not None
        return control_pb2.ModelInfo(
            name=self._model,
            architecture=info.architecture,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            has_chat_template=self._tokenizer.has_chat_template,
            eos_token_ids=self._tokenizer.eos_token_ids,
        )

    async def GetLoad(
        self,
        request: control_pb2.GetLoadRequest,
        context: grpc.aio.ServicerContext[control_pb2.GetLoadRequest, control_pb2.Load],
    ) -> control_pb2.Load:
        return self.load()

    async def WatchLoad(
        self,
        request: control_pb2.WatchLoadRequest,
        context: grpc.aio.ServicerContext[control_pb2.WatchLoadRequest, control_pb2.Load],
    ) -> None:
        interval_s = watch_interval_s(request)
        while True:
            await context.write(self.load())
            await asyncio.sleep(interval_s)

    async def Abort(
        self,
        request: control_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[control_pb2.AbortRequest, control_pb2.AbortResponse],
    ) -> control_pb2.AbortResponse:
        self._live.abort(request.request_id)
        return control_pb2.AbortResponse()

    async def Drain(
        self,
        request: control_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[control_pb2.DrainRequest, control_pb2.DrainResponse],
    ) -> control_pb2.DrainResponse:
        await self.start_draining()
        await self._live.wait_idle()
        return control_pb2.DrainResponse()

    async def FlushCache(
        self,
        request: control_pb2.FlushCacheRequest,
        context: grpc.aio.ServicerContext[control_pb2.FlushCacheRequest, control_pb2.FlushCacheResponse],
    ) -> control_pb2.FlushCacheResponse:
        self._dispatcher.pick()
        freed = [await channel.flush_cache() for channel in self._dispatcher.ready]
        return control_pb2.FlushCacheResponse(freed_blocks=sum(freed))

    async def Trace(
        self,
        request: control_pb2.TraceRequest,
        context: grpc.aio.ServicerContext[control_pb2.TraceRequest, control_pb2.TracePart],
    ) -> None:
        if request.HasField("last_s") and not request.last_s > 0:
            raise InvalidArgument("last_s", f"{request.last_s} s is not positive")
        self._dispatcher.pick()
        for at, channel in enumerate(self._dispatcher.channels):
            if channel.is_ready:
                for part in await channel.trace(request):
                    part.engine = at
                    await context.write(part)

    async def start_draining(self) -> None:
        await self._state.drain()

    def load(self) -> control_pb2.Load:
        """Summed over the engines; what describes a step is that of the first one that is ready."""
        load = control_pb2.Load()
        ready = self._dispatcher.ready
        for channel in ready:
            for field, value in channel.load.ListFields():
                if channel is ready[0] or not field.name.startswith("step_"):
                    setattr(load, field.name, getattr(load, field.name) + value)
        add_tenants(load, (channel.tenants for channel in ready))
        load.kv_waste = load.kv_slots_unused / load.kv_slots if load.kv_slots else 0.0
        load.prefix_hit_rate = load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
        load.requests = self._admission.requests
        load.reserved_tokens = self._admission.tokens
        return load


def watch_interval_s(request: control_pb2.WatchLoadRequest) -> float:
    """Raises InvalidArgument."""
    interval_s = request.interval.seconds + request.interval.nanos / 1e9 if request.HasField("interval") else 1.0
    if not MIN_WATCH_INTERVAL_S <= interval_s <= MAX_WATCH_INTERVAL_S:
        allowed = f"[{MIN_WATCH_INTERVAL_S}, {MAX_WATCH_INTERVAL_S:.0f}] s"
        raise InvalidArgument("interval", f"{interval_s} s is outside {allowed}")
    return interval_s
