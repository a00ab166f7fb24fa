"""A router's ports: the servers of gRPC and HTTP, with every service on them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2_grpc

from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc

from ... import installed_version
from ...channel.listening import GrpcPort
from ...settings import RouterSettings, ServeConfig
from ..adapters.kserve import GrpcInferenceService
from ..adapters.translation import Adapter
from ..adapters.vllm import VllmEngine
from ..engines.block_events import BlockEvents
from ..engines.fleet import Fleet
from ..engines.stream import Wakeups
from ..errors import ConfigError
from ..request.inference import InferenceServicer
from ..request.loras import Loras
from ..request.services import Services
from ..tenants.identity import Identities
from .call_guard import CallGuard, Refusal
from .control import AdminServicer, ControlServicer, ServingState
from .public_port import bind, server_options
from .reflection import add_reflection
from .shared_control import RouterGroup

# What serves HTTP is imported where it is used: a router without an HTTP port starts sooner, and with less memory.
if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from ..http.server import HttpPort
    from ..telemetry.metrics import Sample, Tally


@dataclass(frozen=True, slots=True)
class Served:
    """What the ports give access to.

    folders          those of the models, by name; the first one is that of requests that name none
    services         of requests
    tally            what is counted for metrics; None: there is no HTTP port
    engine_restarts  how often the spawned engine has been started again
    """

    config: ServeConfig
    folders: Mapping[str, Path]
    services: Services
    fleet: Fleet
    state: ServingState
    identities: Identities
    wakeups: Wakeups
    block_events: BlockEvents
    tally: Tally | None
    engine_restarts: Callable[[], int]


class Ports:
    """The servers of a router, which listen from `listen` on.

    socket  of this router's private services; its folder holds those of all routers of the server
    """

    def __init__(self, served: Served, socket: Path) -> None:
        config, services = served.config, served.services
        self._served = served
        self._name = next(iter(served.folders))
        self._port: GrpcPort | None = None  # set once it listens
        self._http: HttpPort | None = None  # set with --http, once it listens
        self._max_bytes = services.messages.max_bytes
        self.inference = InferenceServicer(
            services,
            stall_timeout_s=config.stall_timeout_s,
            resume_s=config.resume_s,
            times=served.tally.times if served.tally else None,
        )
        self._control = ControlServicer(
            models=services.models,
            admission=services.admission,
            fleet=served.fleet,
            state=served.state,
            engine_restarts=served.engine_restarts,
            max_message_bytes=self._max_bytes,
            settings=config.reported(RouterSettings, served_model_name=self._name, reflection=config.has_reflection),
        )
        self._loras = Loras(services.models, Path(config.lora_dir) if config.lora_dir else None)
        self._admin = AdminServicer(fleet=served.fleet, live=services.live, state=served.state, loras=self._loras)
        self.group = RouterGroup(self._control, self._admin, self.inference, served.tally, socket)
        self._server = self._make_server()

    async def listen(self, takes_over: bool) -> tuple[str, str]:
        """Serve gRPC, and bind the port of HTTP if there is one. Return its address and URL. Raises ConfigError.

        takes_over  whether another router of this server may listen at the same Unix socket
        """
        config = self._served.config
        try:
            self._port = bind(self._server, config, takes_over)
            await self._server.start()
            if config.http:
                from .http_port import http_port

                self._http = http_port(
                    config.http,
                    config,
                    self._http_routes(),
                    self._served.identities,
                    on_refusal=self._served.services.observers.refused,
                    shares_port=True,
                    are_streams_late=lambda: self._served.wakeups.are_late,
                )
        except ConfigError:
            await self._server.stop(None)  # otherwise it complains when it is collected, after its loop has closed
            raise
        return self._port.address, self._http.url if self._http else ""

    async def run_http(self) -> None:
        if self._http:
            await self._http.run()

    async def leave(self, age_s: float, grace_s: float) -> None:
        """Leave the port to other routers, and serve the open connections until their calls have ended.

        age_s    in which clients start calls on the connections that they have
        grace_s  in which those calls end
        """
        http = (self._http.leave(age_s + grace_s),) if self._http else ()
        await asyncio.gather(self._leave_grpc(age_s, grace_s), *http)

    async def _leave_grpc(self, age_s: float, grace_s: float) -> None:
        async def serve_other_routers() -> None:
            with contextlib.suppress(TimeoutError):  # streams that were resumed there, too
                await asyncio.wait_for(self._served.services.live.wait_idle(), grace_s)

        if self._port:
            await asyncio.to_thread(self._port.leave)
        await asyncio.sleep(age_s)
        await asyncio.gather(self._server.stop(grace_s), serve_other_routers())

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, and end what has not ended within the grace period."""
        if self._port:
            self._port.close()
        http = (self._http.stop(grace_s),) if self._http else ()
        await asyncio.gather(self._server.stop(grace_s), self.group.leave(), *http)

    # -- what is served ------------------------------------------------------------------------------------------------

    def _make_server(self) -> grpc.aio.Server:
        config, services = self._served.config, self._served.services
        refusals: dict[str, Refusal] = {}
        guard = CallGuard(services.messages, self._served.identities, refusals, services.observers.refused)
        options = server_options(True, self._max_bytes, config.max_connection_age_s, config.max_requests)
        server = grpc.aio.server(options=options, interceptors=[guard])
        control: control_pb2_grpc.ControlServicer = self.group.control
        admin: admin_pb2_grpc.AdminServicer = self.group.admin
        control_pb2_grpc.add_ControlServicer_to_server(control, server)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
        protocols: list[Adapter] = [self.inference, *self._adapters(control, admin)]
        for each in protocols:
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(each.service, each.handlers()),))
            refusals |= {f"/{each.service}/{method}": self.inference.refusal for method in each.admitted}
        health_pb2_grpc.add_HealthServicer_to_server(self._served.state.health, server)
        if config.has_reflection:
            reflected = [
                control_pb2.DESCRIPTOR.services_by_name["Control"].full_name,
                admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
                "grpc.health.v1.Health",
                *(each.service for each in protocols),
            ]
            add_reflection(reflected, server, config.stall_timeout_s)
        return server

    def _adapters(
        self, control: control_pb2_grpc.ControlServicer, admin: admin_pb2_grpc.AdminServicer
    ) -> list[Adapter]:
        """Other protocols on the same port."""
        state, stall_timeout_s = self._served.state, self._served.config.stall_timeout_s
        return [
            VllmEngine(
                inference=self.inference,
                control=control,
                admin=admin,
                state=lambda: state.state,
                model=self._served.services.models.first,
                block_events=self._served.block_events,
                stall_timeout_s=stall_timeout_s,
            ),
            GrpcInferenceService(
                inference=self.inference,
                state=lambda: state.state,
                stall_timeout_s=stall_timeout_s,
            ),
        ]

    def _http_routes(self) -> list[BaseRoute]:
        from ..http import anthropic, health, loras, metrics, openai, page, responses, tokens
        from ..http.live import LiveFeed
        from ..telemetry.metrics import Metrics

        served, state = self._served, self._served.state
        assert served.tally is not None, "there is one with --http"
        only_name = self._name if len(served.folders) == 1 else ""
        shown = Metrics(only_name, served.fleet, served.tally, self._known_of_engines, self.group.ask_tallies)
        is_resumable = served.config.resume_s > 0
        about = {"models": [*served.folders], "version": installed_version(), "resumable": is_resumable}
        return [
            *health.routes(lambda: state.state == control_pb2.SERVER_STATE_SERVING),
            *(
                route
                for api in (openai, responses, anthropic, tokens)
                for route in api.routes(self.inference, self._max_bytes)
            ),
            *loras.routes(self.inference, self._loras),
            *page.routes(LiveFeed(served.fleet, self.group.control.current_load), about),
            *metrics.routes(shown.page),
        ]

    def _known_of_engines(self) -> Iterator[Sample]:
        from ..telemetry.metrics import engine_samples

        return engine_samples(
            self._served.fleet,
            self._control.load(),
            self._served.engine_restarts(),
            self._served.services.admission.is_draining,
            self._served.config.metrics_tenants,
        )
