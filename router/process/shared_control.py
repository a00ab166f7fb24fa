"""Several routers that share a port: the router that is asked answers Control, Admin, Resume and metrics for all.

Each router also serves its own services on a private socket. A router that does not answer there is dead and holds no
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

from pagoda.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    trace_pb2,
)

from ..errors import STATUS_DETAILS_KEY, NotFound, Passed, Unavailable
from ..request.client_call import Context
from ..request.inference import InferenceServicer
from ..request.receiving import SMALL_BYTES, Messages
from ..request.services import SERVICE
from ..telemetry.load_feed import LoadFeed
from ..tenants.identity import TENANT_KEY, Identities
from ..tenants.own_view import seen_load
from .call_guard import CallGuard
from .control import AdminServicer, ControlServicer, tenant_to_abort_for
from .public_port import server_options

if TYPE_CHECKING:
    from ..telemetry.metrics import Tally

ASK_TIMEOUT_S = 2.0
UNLOAD_TIMEOUT_S = 60.0  # it waits for adapters that are being loaded
_NEW_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
_DEAD = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_PRIVATE = "pagoda.Router"  # a service of routers for each other, in bytes
_ANY_SIZE = ("grpc.max_receive_message_length", -1)

Answer = TypeVar("Answer")


class RouterGroup:
    """The routers that share a port, as one of them sees them.

    control, admin  services that answer for all routers
    """

    def __init__(
        self,
        control: ControlServicer,
        admin: AdminServicer,
        inference: InferenceServicer,
        tally: Tally | None,
        socket: Path,
    ) -> None:
        """
        control, admin, inference  this router's own services
        tally                      what it counts for metrics; None: nothing
        socket                     of this router's private services, in a folder that holds those of all routers
        """
        self._socket = socket
        guard = CallGuard(Messages(SMALL_BYTES, ASK_TIMEOUT_S), Identities())  # only routers reach this socket
        self._private = grpc.aio.server(options=server_options(False, SMALL_BYTES), interceptors=[guard])
        control_pb2_grpc.add_ControlServicer_to_server(control, self._private)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, self._private)
        resume = grpc.stream_stream_rpc_method_handler(
            inference.resume_here, None, inference_pb2.GenerateResponse.SerializeToString
        )
        self._private.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Resume": resume}),))
        if tally is not None:
            counts = grpc.stream_unary_rpc_method_handler(partial(_serialized, tally))
            self._private.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_PRIVATE, {"Tally": counts}),))
        inference.resume_elsewhere = self.resume
        self.control = SharedControl(control, self)
        self.admin = SharedAdmin(admin, self)

    @property
    def _others(self) -> list[str]:
        """Addresses of the other routers: of this generation, and of those that it replaces or that replace it."""
        return [f"unix:{found}" for found in sorted(self._socket.parent.glob("*.sock")) if found != self._socket]

    async def start(self) -> None:
        """Start to answer the other routers."""
        self._private.add_insecure_port(f"unix:{self._socket}")
        await self._private.start()

    async def leave(self) -> None:
        """Stop answering the other routers."""
        await self._private.stop(grace=None)

    async def are_others_draining(self) -> bool:
        """Whether another router is draining; a router that starts must then drain too."""
        request = control_pb2.GetServerInfoRequest()
        infos = await self.ask_control(lambda stub: stub.GetServerInfo(request, timeout=ASK_TIMEOUT_S))
        return any(info.state == control_pb2.SERVER_STATE_DRAINING for info in infos)

    async def resume(
        self,
        request: inference_pb2.ResumeRequest,
        tenant: str,
        timeout_s: float | None,
        write: Callable[[inference_pb2.GenerateResponse], Awaitable[None]],
    ) -> bool:
        """Write a stream that another router keeps; return False if none does. Raises the error that ends it there."""
        for socket in self._others:
            has_begun = False
            try:
                async with grpc.aio.insecure_channel(socket, options=[*_NEW_CONNECTION, _ANY_SIZE]) as channel:
                    stub = inference_pb2_grpc.InferenceStub(channel)
                    metadata = ((TENANT_KEY, tenant),) if tenant else ()
                    async for response in stub.Resume(request, timeout=timeout_s, metadata=metadata):
                        has_begun = True
                        await write(response)
                    return True
            except grpc.aio.AioRpcError as error:
                if has_begun or not (error.code() is grpc.StatusCode.NOT_FOUND or _is_dead(error)):
                    raise Passed(error) from None
        return False

    async def ask_control(self, call: Callable[[control_pb2_grpc.ControlStub], Awaitable[Answer]]) -> list[Answer]:
        """The answers of the other routers that are alive."""
        return await self._ask(lambda channel: call(control_pb2_grpc.ControlStub(channel)))

    async def ask_admin(self, call: Callable[[admin_pb2_grpc.AdminStub], Awaitable[Answer]]) -> list[Answer]:
        """The answers of the other routers that are alive and have found the request."""
        return await self._ask(lambda channel: call(admin_pb2_grpc.AdminStub(channel)))

    async def ask_tallies(self) -> list[bytes]:
        """The serialized tallies of the other routers. Raises Unavailable if one that lives does not answer.

        Without its part the sums would look as if counts had started over.
        """

        async def ask(channel: grpc.aio.Channel) -> bytes:
            try:
                answer: bytes = await channel.unary_unary(f"/{_PRIVATE}/Tally")(b"", timeout=ASK_TIMEOUT_S)
                return answer
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise Unavailable("a router does not answer") from None
                raise

        return await self._ask(ask)

    async def _ask(self, call: Callable[[grpc.aio.Channel], Awaitable[Answer]]) -> list[Answer]:
        async def ask(socket: str) -> Answer | None:
            try:
                # Connect anew each time: gRPC delays a reconnect after a failure.
                async with grpc.aio.insecure_channel(socket, options=_NEW_CONNECTION) as channel:
                    return await call(channel)
            except grpc.aio.AioRpcError as error:
                if error.code() in (*_DEAD, grpc.StatusCode.NOT_FOUND):
                    return None
                raise

        answers = await asyncio.gather(*(ask(socket) for socket in self._others))
        return [answer for answer in answers if answer is not None]


async def _serialized(tally: Tally, _: object, context: object) -> bytes:
    return tally.serialized()


def _is_dead(error: grpc.aio.AioRpcError) -> bool:
    """Whether a router did not answer. One that is alive adds details to each status."""
    return error.code() in _DEAD and STATUS_DETAILS_KEY not in dict(error.trailing_metadata() or ())


class SharedControl(control_pb2_grpc.ControlServicer):
    def __init__(self, own: ControlServicer, group: RouterGroup) -> None:
        self._own = own
        self._group = group
        self._feed = LoadFeed(self.current_load)

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: Context
    ) -> control_pb2.ServerInfo:
        info = await self._own.GetServerInfo(request, context)
        for other in await self._group.ask_control(lambda stub: stub.GetServerInfo(request, timeout=ASK_TIMEOUT_S)):
            info.limits.max_requests += other.limits.max_requests
            info.limits.max_queued_tokens += other.limits.max_queued_tokens
        for name in ("max_requests", "max_queued_tokens"):  # each router has a share of these
            info.settings[name] = str(getattr(info.limits, name))
        return info

    async def ListModels(
        self, request: control_pb2.ListModelsRequest, context: Context
    ) -> control_pb2.ListModelsResponse:
        return await self._own.ListModels(request, context)

    async def GetLoad(self, request: control_pb2.GetLoadRequest, context: Context) -> control_pb2.Load:
        return seen_load(await self.current_load())

    async def WatchLoad(self, request: control_pb2.WatchLoadRequest, context: Context) -> None:
        await self._feed.watch(request, context)

    async def GetStepTrace(self, request: trace_pb2.GetStepTraceRequest, context: Context) -> None:
        await self._own.GetStepTrace(request, context)

    async def current_load(self) -> control_pb2.Load:
        """The load of all routers."""
        request = control_pb2.GetLoadRequest()
        load = self._own.load()
        for other in await self._group.ask_control(lambda stub: stub.GetLoad(request, timeout=ASK_TIMEOUT_S)):
            load.requests += other.requests
            load.reserved_tokens += other.reserved_tokens
        return load


class SharedAdmin(admin_pb2_grpc.AdminServicer):
    def __init__(self, own: AdminServicer, group: RouterGroup) -> None:
        self._own = own
        self._group = group

    async def Abort(self, request: admin_pb2.AbortRequest, context: Context) -> admin_pb2.AbortResponse:
        """Abort the request on every router: several hold one if a client used its id twice."""
        request = admin_pb2.AbortRequest(request_id=request.request_id, tenant=tenant_to_abort_for(request))
        ended = await self._group.ask_admin(lambda stub: stub.Abort(request, timeout=ASK_TIMEOUT_S))
        try:
            return await self._own.Abort(request, context)
        except NotFound:
            if not ended:
                raise
            return admin_pb2.AbortResponse()

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        # Drain this router first: one that starts too late for the call below asks this one.
        await self._own.start_draining()
        await self._group.ask_admin(lambda stub: stub.Drain(request))
        return await self._own.Drain(request, context)

    async def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Context) -> admin_pb2.FlushCacheResponse:
        return await self._own.FlushCache(request, context)  # all routers share the engines

    async def LoadLora(self, request: admin_pb2.LoadLoraRequest, context: Context) -> admin_pb2.LoadLoraResponse:
        return await self._own.LoadLora(request, context)  # the engines report it to all routers

    async def UnloadLora(self, request: admin_pb2.UnloadLoraRequest, context: Context) -> admin_pb2.UnloadLoraResponse:
        """Unload it on every router: one whose engines could not load it again is known to routers alone."""
        found = await self._group.ask_admin(lambda stub: stub.UnloadLora(request, timeout=UNLOAD_TIMEOUT_S))
        try:
            return await self._own.UnloadLora(request, context)
        except NotFound:
            if not found:
                raise
            return admin_pb2.UnloadLoraResponse()

    async def ListLoras(self, request: admin_pb2.ListLorasRequest, context: Context) -> admin_pb2.ListLorasResponse:
        return await self._own.ListLoras(request, context)
