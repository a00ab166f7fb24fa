"""The Control and Admin services of one router: inspect a running server, and steer it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from grpc_health.v1 import health, health_pb2

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc, trace_pb2

from ... import installed_version
from ..engines.channel import EngineChannel
from ..engines.fleet import Fleet
from ..engines.waiting import Waiting
from ..errors import InvalidArgument
from ..request.admission import Admission, LiveRequests
from ..request.client_call import Context
from ..request.loras import Loras, adapters_of
from ..request.models import ServedModel, ServedModels
from ..request.sampling import recommended_sampling
from ..request.wire import MAX_FIELDS
from ..telemetry.load_feed import MAX_TRACES, LoadFeed, Places
from ..tenants.caller import Right, caller
from ..tenants.own_view import seen_info, seen_load, seen_trace

log = logging.getLogger("pagoda.router")

INFERENCE_SERVICES = ("", "pagoda.v1.Inference")
OTHER_SERVICES = ("pagoda.v1.Control", "pagoda.v1.Admin")
MAX_TENANTS_LISTED = 64


class ServingState:
    """Whether this router can serve: an engine is ready, with the adapters of --lora, or requests wait for one.

    It cannot while it drains.

    models  with several, health is also that of each, as `pagoda.v1.Inference/NAME`
    """

    def __init__(
        self, fleet: Fleet, admission: Admission, models: ServedModels, waiting: Waiting | None = None
    ) -> None:
        self.health = health.aio.HealthServicer()
        self._models = models
        self._fleet = fleet
        self._admission = admission
        self._waiting = waiting or Waiting()

    @property
    def state(self) -> control_pb2.ServerState:
        if self._admission.is_draining:
            return control_pb2.SERVER_STATE_DRAINING
        if self._waiting.is_on or any(model.is_ready for model in self._models):
            return control_pb2.SERVER_STATE_SERVING
        if self._models.refusal() is None:  # adapters are being loaded
            return control_pb2.SERVER_STATE_STARTING
        if any(channel.has_been_ready for channel in self._fleet.channels):
            return control_pb2.SERVER_STATE_UNAVAILABLE
        return control_pb2.SERVER_STATE_STARTING

    async def refresh(self) -> None:
        """Report the state to the health service. Control and Admin answer in every state, so they always serve."""
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        is_serving = self.state == control_pb2.SERVER_STATE_SERVING
        for service in INFERENCE_SERVICES:
            await self.health.set(service, serving if is_serving else not_serving)
        for model in self._models if len(self._models) > 1 else ():
            is_ready = is_serving and (self._waiting.is_on or model.is_ready)
            await self.health.set(f"{INFERENCE_SERVICES[1]}/{model.name}", serving if is_ready else not_serving)
        for service in OTHER_SERVICES:
            await self.health.set(service, serving)

    async def drain(self) -> None:
        """Report NOT_SERVING and admit no new requests; running requests continue."""
        self._admission.is_draining = True
        self._waiting.end()
        await self.refresh()


class ControlServicer(control_pb2_grpc.ControlServicer):
    """The Control service.

    engine_restarts  how often this server has restarted its own engine; 0 for engines that were started elsewhere
    """

    def __init__(
        self,
        *,
        models: ServedModels,
        admission: Admission,
        fleet: Fleet,
        state: ServingState,
        engine_restarts: Callable[[], int],
        max_message_bytes: int,
        settings: dict[str, str],
    ) -> None:
        self._models = models
        self._admission = admission
        self._fleet = fleet
        self._state = state
        self._engine_restarts = engine_restarts
        self._max_message_bytes = max_message_bytes
        self._settings = settings
        self._started = time.monotonic()
        self._feed = LoadFeed(self.current_load)
        self._traces = Places("GetStepTrace", MAX_TRACES)

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: Context
    ) -> control_pb2.ServerInfo:
        limits = self._models.limits
        restarts = self._engine_restarts()
        info = control_pb2.ServerInfo(
            version=installed_version(),
            model=self._models.first.name,
            state=self._state.state,
            engines=[_status(channel, restarts) for channel in self._fleet.channels],
            limits=control_pb2.Limits(
                max_requests=self._admission.max_requests,
                max_queued_tokens=self._admission.max_tokens,
                max_message_bytes=self._max_message_bytes,
                max_text_bytes=limits.max_text_bytes,
                max_n=limits.max_n,
                max_logprobs=limits.max_logprobs,
                max_stop_strings=limits.max_stop,
                max_tools=limits.max_tools,
                max_messages=limits.max_messages,
                max_fields=MAX_FIELDS,
            ),
            uptime_s=time.monotonic() - self._started,
            settings=self._settings | {"max_queued_tokens": str(self._admission.max_tokens)},
        )
        return seen_info(info)

    async def ListModels(
        self, request: control_pb2.ListModelsRequest, context: Context
    ) -> control_pb2.ListModelsResponse:
        return control_pb2.ListModelsResponse(models=map(_described, self._models))

    async def GetLoad(self, request: control_pb2.GetLoadRequest, context: Context) -> control_pb2.Load:
        return seen_load(self.load())

    async def WatchLoad(self, request: control_pb2.WatchLoadRequest, context: Context) -> None:
        await self._feed.watch(request, context)

    async def GetStepTrace(self, request: trace_pb2.GetStepTraceRequest, context: Context) -> None:
        if request.HasField("last_s") and not request.last_s > 0:
            raise InvalidArgument("last_s", f"is {request.last_s:g}, must be above 0")
        self._fleet.pick()
        with self._traces:
            for channel in list(self._fleet.channels):  # others may join meanwhile
                if channel.is_ready:
                    parts = await channel.questions.trace(request.last_s if request.HasField("last_s") else None)
                    async for part in seen_trace(parts):
                        part.engine = channel.number
                        part.name = channel.name if caller().may(Right.OBSERVE) else ""
                        await context.write(part)

    async def current_load(self) -> control_pb2.Load:
        """The load of all routers: this one is alone."""
        return self.load()

    def load(self) -> control_pb2.Load:
        """The load as of each ready engine's last step."""
        load = control_pb2.Load(requests=self._admission.requests, reserved_tokens=self._admission.tokens)
        for channel in self._fleet.channels:
            if channel.is_ready:
                engine = load.engines.add()
                engine.CopyFrom(channel.sequences.load)
                engine.engine, engine.name = channel.number, channel.name
                engine.kv_waste = engine.kv_slots_unused / engine.kv_slots if engine.kv_slots else 0.0
                engine.prefix_hit_rate = engine.cached_tokens / engine.prompt_tokens if engine.prompt_tokens else 0.0
        add_tenants(load, (channel.sequences.tenants for channel in self._fleet.ready))
        return load


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """The Admin service."""

    def __init__(self, *, fleet: Fleet, live: LiveRequests, state: ServingState, loras: Loras) -> None:
        self.loras = loras
        self._fleet = fleet
        self._live = live
        self._state = state

    async def Abort(self, request: admin_pb2.AbortRequest, context: Context) -> admin_pb2.AbortResponse:
        self._live.abort(tenant_to_abort_for(request), request.request_id)
        return admin_pb2.AbortResponse()

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        await self.start_draining()
        await self._live.wait_idle()
        return admin_pb2.DrainResponse()

    async def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Context) -> admin_pb2.FlushCacheResponse:
        self._fleet.pick()
        freed = [await channel.questions.flush_cache() for channel in self._fleet.ready]
        return admin_pb2.FlushCacheResponse(freed_blocks=sum(freed))

    async def LoadLora(self, request: admin_pb2.LoadLoraRequest, context: Context) -> admin_pb2.LoadLoraResponse:
        return admin_pb2.LoadLoraResponse(adapter=await self.loras.load(request))

    async def UnloadLora(self, request: admin_pb2.UnloadLoraRequest, context: Context) -> admin_pb2.UnloadLoraResponse:
        await self.loras.unload(request.lora_name)
        return admin_pb2.UnloadLoraResponse()

    async def ListLoras(self, request: admin_pb2.ListLorasRequest, context: Context) -> admin_pb2.ListLorasResponse:
        return admin_pb2.ListLorasResponse(adapters=self.loras.all())

    async def start_draining(self) -> None:
        await self._state.drain()


def tenant_to_abort_for(request: admin_pb2.AbortRequest) -> str:
    """Whose request an Abort call means. Raises PermissionDenied."""
    if not request.HasField("tenant") or request.tenant == caller().tenant:
        return caller().tenant
    caller().require(Right.ADMIN, "tenant: to abort another tenant's request")
    return request.tenant


def add_tenants(load: control_pb2.Load, engines: Iterable[engine_pb2.Tenants]) -> None:
    """Sum each tenant's load over all engines. Tenants that an engine does not list are counted, not summed."""
    merged: dict[str, control_pb2.TenantLoad] = {}
    unlisted = recent_service = 0
    for tenants in engines:
        unlisted = max(unlisted, tenants.count - len(tenants.listed))  # engines may leave out the same tenants
        recent_service += tenants.recent_service
        for of_engine in tenants.listed:
            total = merged.setdefault(of_engine.name, control_pb2.TenantLoad(name=of_engine.name))
            total.waiting += of_engine.waiting
            total.running += of_engine.running
            total.service += of_engine.service
            total.recent_service += of_engine.recent_service
    for total in merged.values():
        total.share = total.recent_service / recent_service if recent_service else 0.0
    most_served = sorted(merged.values(), key=lambda tenant: tenant.recent_service, reverse=True)
    load.tenants.extend(most_served[:MAX_TENANTS_LISTED])
    load.num_tenants = len(merged) + unlisted


def _described(model: ServedModel) -> control_pb2.ModelInfo:
    limits, tokenizer, template = model.limits, model.tokenizer, model.tokenizer.chat_template
    capabilities = [control_pb2.CAPABILITY_GENERATE]
    if tokenizer.has_bytes:
        capabilities.append(control_pb2.CAPABILITY_GUIDED)
    if template is not None:
        capabilities.append(control_pb2.CAPABILITY_CHAT)
        if template.reads_tools:
            capabilities.append(control_pb2.CAPABILITY_TOOLS)
    capabilities += [control_pb2.CAPABILITY_EMBED, control_pb2.CAPABILITY_SCORE]
    return control_pb2.ModelInfo(
        name=model.name,
        ready=bool(model.engines.ready),
        architecture=model.architecture,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len if model.architecture else 0,
        eos_token_ids=tokenizer.eos_token_ids,
        capabilities=capabilities,
        template_kwargs=template.kwargs if template is not None else (),
        hidden_size=limits.hidden_size if model.architecture else 0,
        recommended_sampling=recommended_sampling(tokenizer.recommended),
        tool_format=model.format.tool_format if model.format else "",
        reasoning_format=model.format.reasoning_format if model.format else "",
        adapters=adapters_of(model),
    )


def _status(channel: EngineChannel, restarts: int) -> control_pb2.EngineStatus:
    if channel.takes_requests:
        state = control_pb2.ENGINE_STATE_READY
    elif channel.is_ready:
        state = control_pb2.ENGINE_STATE_DRAINING
    elif channel.standing.refused:
        state = control_pb2.ENGINE_STATE_REFUSED
    elif channel.has_been_ready:
        state = control_pb2.ENGINE_STATE_UNAVAILABLE
    else:
        state = control_pb2.ENGINE_STATE_LOADING
    return control_pb2.EngineStatus(
        engine=channel.number,
        name=channel.name,
        model=channel.model,
        state=state,
        restarts=restarts,
        info=channel.info,
        refused="" if channel.is_ready else channel.standing.refused,
    )
