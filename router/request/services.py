"""What the handlers of calls share, and what one call holds of it from its admission to its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pagoda.v1 import inference_pb2

from ..engines.channel import EngineChannel
from ..engines.fleet import Engines
from ..engines.waiting import Waiting
from ..errors import EngineLost, Unavailable
from ..tenants.caller import Caller, caller
from ..tenants.quotas import Quotas, Spending
from .admission import Admission, LiveRequest, LiveRequests, Reservation
from .client_call import ClientCall, time_left
from .failover import Failover
from .migration import Migrations
from .models import ServedModels, Target
from .receiving import Messages, Received
from .record import Observers, Record

Params = TypeVar("Params")
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a router that serve a call."""

    models: ServedModels
    admission: Admission
    quotas: Quotas
    messages: Messages
    live: LiveRequests
    observers: Observers
    failover: Failover
    migrations: Migrations
    waiting: Waiting

    def check_takes(self, target: Target) -> None:
        """Raise Unavailable if no engine can compute for a target, and requests do not wait for one. Or NotFound."""
        if not self.waiting.is_on:
            target.check_ready()

    @contextlib.asynccontextmanager
    async def admitted(
        self, method: str, route: str, call: ClientCall, most: int | None = None
    ) -> AsyncIterator[AdmittedCall]:
        """Admit a call, and read its message. What it holds is given back when the block ends; observers learn how.

        method  see Record, as for route
        most    bytes of the message, at most; None: as many as gRPC accepts

        The task's caller is set. Raises ResourceExhausted, Unavailable, InvalidArgument.
        """
        received, asker = time.monotonic(), caller()
        record = Record(method, asker.tenant, call.invocation_metadata() or (), route)
        with (
            self.observers.recording(record),
            self.admission.reserve(asker.tenant) as reservation,
            self.quotas.enter(asker.tenant) as spending,
            await self.messages.read(call, most=most) as message,
        ):
            admitted = AdmittedCall(self, call, asker, received, reservation, spending, message, record)
            try:
                yield admitted
            finally:
                if admitted.is_live:
                    self.live.remove(asker.tenant, record.request_id)


@dataclass(slots=True, eq=False)
class AdmittedCall:
    """A call that has been admitted, and what it holds.

    received    when it came, on the monotonic clock
    live        its request, once `begin` was called
    num_losses  engines that were lost while they computed the request
    """

    services: Services
    call: ClientCall
    asker: Caller
    received: float
    reservation: Reservation
    spending: Spending
    message: Received
    record: Record
    live: LiveRequest = field(default_factory=LiveRequest)
    is_live: bool = False
    num_losses: int = 0

    async def wanted(
        self,
        checked: Callable[[bytes], tuple[Target, Params]],
        judged: Callable[[Target, Params], Awaitable[object]],
    ) -> tuple[Target, Params]:
        """What the message asks for, once an engine can take it.

        checked  parses the message and checks it. It is called again after a wait: the engine's limits are known then
        judged   checks the rest, before a wait: what is wrong with a request is no reason to start an engine

        Raises what they raise, and Unavailable.
        """
        target, params = await self.message.parsed(checked, is_last=not self.services.waiting.is_on)
        self.note_target(target)
        try:
            target.check_ready()
        except Unavailable:
            self.services.check_takes(target)
            await judged(target, params)
            await self.engine_for(target)
            target, params = await self.message.parsed(checked)
        return target, params

    async def engine_for(self, target: Target) -> None:
        """Wait until an engine can compute for a target, if requests wait here. Raises Unavailable, NotFound."""
        self.services.check_takes(target)
        await self.services.waiting.new(target.check_ready, time_left(self.call))

    def note_target(self, target: Target) -> None:
        """Note which model the request asks for, and which adapter."""
        if len(self.services.models) > 1:
            self.record.model = target.model.name
        self.record.adapter = target.adapter

    def check_draining(self) -> None:
        """Raise Unavailable if the server drains: that may have begun since the call was admitted."""
        if self.services.admission.is_draining:
            raise Unavailable("the server is draining")

    async def elsewhere(
        self, engines: Engines, engine: EngineChannel, lost: EngineLost, *, has_begun: bool
    ) -> EngineChannel:
        """Choose another of these engines for the request, which has lost this one: see Failover."""
        self.record.num_failovers += 1
        self.num_losses += not lost.has_left
        return await self.services.failover.elsewhere(
            engines, engine, lost, num_losses=self.num_losses, has_begun=has_begun, timeout_s=time_left(self.call)
        )

    def begin(self, request_id: str) -> None:
        """Note the request that was read, which Abort finds from now on. Raises AlreadyExists."""
        self.record.request_id = request_id
        self.live = self.services.live.add(self.asker.tenant, request_id)
        self.is_live = True
