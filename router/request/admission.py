"""Admission: bound the requests and tokens that the router holds, and know which requests are live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from pagoda_server.router.engines.stream import EngineStream
from pagoda_server.router.errors import AlreadyExists, NotFound, PagodaError, ResourceExhausted, Unavailable
from pagoda_server.router.request.beam_search import BeamSearchStream
from pagoda_server.router.request.resuming import ResumedStream

_SMOOTHING = 0.1
_RETRY_AFTER_S = (0.1, 30.0)


class Reservation:
    """One request's share of the limits; a context manager that gives it back."""

    def __init__(self, admission: Admission) -> None:
        self.tokens = 0
        self._admission = admission

    def grow(self, tokens: int) -> None:
        """Reserve more tokens. Raises ResourceExhausted."""
        self._admission.take(tokens, already=self.tokens)
        self.tokens += tokens

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.give_back(self)


class Admission:
    """Admits requests within two limits.

    max_requests  requests at once, queued and running
    max_tokens    prompt + max_tokens of all admitted requests
    """

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0
        self.is_draining = False
        self._clock = clock
        self._last_departure: float | None = None
        self._departure_interval_s = 1.0

    def refusal(self, tenant: str) -> PagodaError | None:
        """Why a tenant's request would be refused now: the server drains or is full. None: it would be admitted."""
        if self.is_draining:
            return Unavailable("the server is draining")
        if self.requests >= self.max_requests:
            return self._full(f"{self.requests} requests are admitted, the limit is {self.max_requests}")
        if self.requests and self.tokens >= self.max_tokens:
            return self._full(f"{self.tokens} tokens are reserved, the limit is {self.max_tokens}")
        return None

    def reserve(self, tenant: str) -> Reservation:
        """Admit a tenant's request; `Reservation.grow` adds its tokens once known. Raises what `refusal` returns."""
        if (error := self.refusal(tenant)) is not None:
            raise error
        self.requests += 1
        return Reservation(self)

    def take(self, tokens: int, already: int = 0) -> None:
        """Reserve tokens for a request that holds `already` of them. Raises ResourceExhausted."""
        # A request alone is always admitted: the engine itself bounds what one request may hold.
        if self.tokens > already and self.tokens + tokens > self.max_tokens:
            raise self._full(f"{self.tokens} tokens are reserved, {tokens} more exceed the limit of {self.max_tokens}")
        self.tokens += tokens

    def give_back(self, reservation: Reservation) -> None:
        self.requests -= 1
        self.tokens -= reservation.tokens
        if not reservation.tokens:
            return  # its message was wrong: how fast such calls end says nothing about the queue
        now = self._clock()
        if self._last_departure is not None:
            self._departure_interval_s += _SMOOTHING * (now - self._last_departure - self._departure_interval_s)
        self._last_departure = now

    def _full(self, why: str) -> ResourceExhausted:
        # In the recent past, one place became free in each departure interval.
        low, high = _RETRY_AFTER_S
        return ResourceExhausted(
            f"the queue is full: {why}",
            retry_after_s=round(min(max(self._departure_interval_s, low), high), 1),  # few values: see CallGuard
            queue_depth=self.requests,
        )


class LiveRequest:
    """An admitted request that has not ended."""

    def __init__(self) -> None:
        # None while the prompt is being tokenized
        self.stream: EngineStream | BeamSearchStream | ResumedStream | None = None
        self.is_aborted = False


class LiveRequests:
    """The live requests of this router, by id."""

    def __init__(self) -> None:
        self._requests: dict[str, LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str) -> LiveRequest:
        """Register a request. Raises AlreadyExists."""
        if request_id in self._requests:
            raise AlreadyExists("request_id: a live request has this id")
        self._idle.clear()
        live = self._requests[request_id] = LiveRequest()
        return live

    def remove(self, request_id: str) -> None:
        del self._requests[request_id]
        if not self._requests:
            self._idle.set()

    def abort(self, request_id: str) -> None:
        """End a request; its stream finishes as CANCELLED. Raises NotFound."""
        if (live := self._requests.get(request_id)) is None:
            raise NotFound("request_id: no live request has this id")
        live.is_aborted = True
        if live.stream:
            live.stream.abort()

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    async def wait_idle(self) -> None:
        await self._idle.wait()
