"""Whether this router can serve, for health checks and for Control."""

from __future__ import annotations

from grpc_health.v1 import health, health_pb2

from pagoda.v1 import control_pb2
from pagoda_server.router.engines.dispatch import Dispatcher
from pagoda_server.router.request.admission import Admission

INFERENCE_SERVICES = ("", "pagoda.v1.Inference")


class ServingState:
    """Ready when an engine is and nobody drains; tells the health service of every change."""

    def __init__(self, dispatcher: Dispatcher, admission: Admission) -> None:
        self.health = health.aio.HealthServicer()
        self._dispatcher = dispatcher
        self._admission = admission
        self._has_been_ready = False

    @property
    def engine_state(self) -> control_pb2.EngineState:
        if self._admission.is_draining:
            return control_pb2.ENGINE_STATE_DRAINING
        if self._dispatcher.ready:
            return control_pb2.ENGINE_STATE_READY
        return control_pb2.ENGINE_STATE_UNAVAILABLE if self._has_been_ready else control_pb2.ENGINE_STATE_LOADING

    async def refresh(self) -> None:
        """To be called after any change. Control answers in every state, so it is always serving."""
        state = self.engine_state
        self._has_been_ready |= state == control_pb2.ENGINE_STATE_READY
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        for service in INFERENCE_SERVICES:
            await self.health.set(service, serving if state == control_pb2.ENGINE_STATE_READY else not_serving)
        await self.health.set("pagoda.v1.Control", serving)

    async def drain(self) -> None:
        """Health says so, and nothing new is admitted; what runs goes on."""
        self._admission.is_draining = True
        await self.refresh()
