"""What the router has taken on: how much, bounded by requests and by tokens, and which requests are live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from pagoda_server.router.engines.stream import EngineStream
from pagoda_server.router.errors import AlreadyExists, NotFound, ResourceExhausted, Unavailable
from pagoda_server.router.request.beam_search import BeamSearchStream

_SMOOTHING = 0.1
_RETRY_AFTER_S = (0.1, 30.0)


class Reservation:
    """A request's share; a context manager that gives it back."""

    def __init__(self, admission: Admission, tokens: int) -> None:
        self.tokens = tokens
        self._admission = admission

    def grow(self, tokens: int) -> None:
        """Reserves more, as the prompt's length becomes known. Raises ResourceExhausted."""
        self._admission.take(tokens, already=self.tokens)
        self.tokens += tokens

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.give_back(self)


class Admission:
    """
    max_requests  requests at once, queued and running
    max_tokens    prompt + max_tokens over them all
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

    def reserve(self, tokens: int) -> Reservation:
        """Admits a request. Raises Unavailable while draining, ResourceExhausted when full."""
        if self.is_draining:
            raise Unavailable("the server is draining")
        if self.requests >= self.max_requests:
            raise self._full(f"{self.requests} requests are admitted, the limit is {self.max_requests}")
        self.take(tokens)
        self.requests += 1
        return Reservation(self, tokens)

    def take(self, tokens: int, already: int = 0) -> None:
        """For a request that holds `already` of the tokens that are reserved. Raises ResourceExhausted."""
        # Somebody alone is always let in: the engine itself bounds what one request may hold.
        if self.tokens > already and self.tokens + tokens > self.max_tokens:
            raise self._full(f"{self.tokens} tokens are reserved, {tokens} more exceed the limit of {self.max_tokens}")
        self.tokens += tokens

    def give_back(self, reservation: Reservation) -> None:
        self.requests -= 1
        self.tokens -= reservation.tokens
        now = self._clock()
        if self._last_departure is not None:
            self._departure_interval_s += _SMOOTHING * (now - self._last_departure - self._departure_interval_s)
        self._last_departure = now

    def _full(self, why: str) -> ResourceExhausted:
        # One place becomes free each departure interval, as far as the recent past tells.
        low, high = _RETRY_AFTER_S
        return ResourceExhausted(
            f"the queue is full: {why}",
            retry_after_s=min(max(self._departure_interval_s, low), high),
            queue_depth=self.requests,
        )


class LiveRequest:
    def __init__(self) -> None:
        self.stream: EngineStream | BeamSearchStream | None = None  # none while the prompt is still being tokenized
        self.is_aborted = False


class LiveRequests:
    def __init__(self) -> None:
        self._requests: dict[str, LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str) -> LiveRequest:
        """Raises AlreadyExists."""
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
        """Its stream ends with CANCELLED. Raises NotFound."""
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
