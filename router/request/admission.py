"""Admission: bound the requests and tokens that the router holds, and know which requests are live."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol

from ..errors import AlreadyExists, NotFound, PagodaError, ResourceExhausted, Unavailable
from .shares import Shares

_SMOOTHING = 0.1
_RETRY_AFTER_S = (0.1, 30.0)
_UNKNOWN_RETRY_S = 1.0
_LIKELY = 0.9  # quantile of output lengths: so many fit into what is reserved for them at first
_FIRST_GUESS = 256  # tokens; it counts like so many outputs:
_GUESS_WEIGHT = 16
_LENGTHS_KEPT = 256
_RETRY_GOOD_S = 0.1  # an estimate walks over all running requests, so refusals share it for this long


class Progress(Protocol):
    """How far a request's output is."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def first_written(self) -> float | None: ...


class OutputLengths:
    """How long an output likely becomes whose length is not limited: a quantile of the last ones that ended."""

    def __init__(self) -> None:
        self._lengths = deque([_FIRST_GUESS] * _GUESS_WEIGHT, _LENGTHS_KEPT)
        self._ordered = list(self._lengths)

    @property
    def likely(self) -> int:
        return self._ordered[int(_LIKELY * len(self._ordered))]

    def add(self, length: int) -> None:
        if len(self._lengths) == _LENGTHS_KEPT:
            del self._ordered[bisect_left(self._ordered, self._lengths[0])]
        self._lengths.append(length)
        insort(self._ordered, length)


class Reservation:
    """One request's share of the limits; a context manager that gives it back.

    Until `starts` is called, it may be evicted in favour of another tenant's. The task that has entered it is then
    cancelled, and it raises ResourceExhausted in place of the CancelledError.
    """

    def __init__(self, admission: Admission, tenant: str) -> None:
        self.tenant = tenant
        self.tokens = 0
        self.max_output = 0
        self.progress: Progress | None = None  # once the engine has the request
        self.eviction: ResourceExhausted | None = None
        self._admission = admission
        self._task: asyncio.Task[object] | None = None
        self._cancels = 0

    def grow(self, tokens: int) -> None:
        """Reserve more tokens. Raises ResourceExhausted."""
        self._admission.grow(self, tokens)

    def extend(self, tokens: int) -> None:
        """Reserve more tokens for a request that runs, even beyond the limit: new requests wait until it falls."""
        self._admission.extend(self, tokens)
        self.max_output += tokens

    def starts(self) -> None:
        """Note that it no longer waits: it cannot be evicted from now on. May be called more than once."""
        self._admission.starts(self)

    def follow(self, progress: Progress, max_output: int) -> None:
        """Say how far the request's output is, from now on, and how many tokens are reserved for it."""
        self.progress, self.max_output = progress, max_output

    def evict(self, why: ResourceExhausted) -> None:
        self.eviction = why
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> Reservation:
        self._task = asyncio.current_task()
        self._cancels = self._task.cancelling() if self._task else 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.eviction is None:
            self._admission.give_back(self)
        elif self._task is not None and self._task.uncancel() <= self._cancels and kind is asyncio.CancelledError:
            raise self.eviction from None


class Admission:
    """Admits requests within two limits, and says when to come back to those that it refuses.

    max_requests  requests at once, queued and running
    max_tokens    tokens that all admitted requests reserve: prompt + max_tokens, or what that likely becomes

    Requests are admitted in the order of their arrival, unless tenants share the limits (see `share` and shares.py):
    a request then also needs to be within its tenant's share, or evicts requests that wait. An evicted request leaves
    its places at once.

    The retry delay is an estimate of when the next running request ends: the least, over all requests whose output has
    begun, of the tokens that it likely still generates times the time that its tokens have taken so far. Of the tokens
    that requests may still generate, they use the fraction that earlier ones have used of theirs. The delay has one
    significant digit, so that there are few different refusals.
    """

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_draining = False
        self.output_lengths = OutputLengths()
        self._places: Shares[Reservation] = Shares(max_requests)
        self._tokens: Shares[Reservation] = Shares(max_tokens)
        self._running: set[Reservation] = set()
        self._clock = clock
        self._fraction_used = 1.0
        self._retry_s = _UNKNOWN_RETRY_S
        self._retry_good_until = 0.0

    @property
    def max_requests(self) -> int:
        return self._places.most

    @property
    def max_tokens(self) -> int:
        return self._tokens.most

    @max_tokens.setter
    def max_tokens(self, most: int) -> None:
        self._tokens.most = most

    @property
    def requests(self) -> int:
        return self._places.total

    @property
    def tokens(self) -> int:
        return self._tokens.total

    def share(self, weights: Mapping[str, float] | None) -> None:
        """Share both limits between tenants by these weights from now on; None: in order of arrival."""
        self._places.share(weights)
        self._tokens.share(weights)

    def refusal(self, tenant: str) -> PagodaError | None:
        """Why a tenant's request would be refused now: the server drains or is full. None: it would be admitted."""
        if self.is_draining:
            return Unavailable("the server is draining")
        for shares in (self._places, self._tokens):
            if not shares.has_room(tenant, 1) and shares.displaced_by(tenant, 1) is None:
                return self._full(shares, tenant, 1)
        return None

    def reserve(self, tenant: str) -> Reservation:
        """Admit a tenant's request; `Reservation.grow` adds its tokens once known. Raises what `refusal` returns."""
        if (error := self.refusal(tenant)) is not None:
            raise error
        reservation = Reservation(self, tenant)
        self._take(self._places, reservation, 1)
        return reservation

    def grow(self, reservation: Reservation, tokens: int) -> None:
        """Reserve more tokens for a request. Raises ResourceExhausted."""
        # A request alone is always admitted: the engine itself bounds what one request may hold.
        if self.tokens == reservation.tokens:
            self._tokens.add(reservation.tenant, reservation, tokens)
        else:
            self._take(self._tokens, reservation, tokens, already=reservation.tokens)
        reservation.tokens += tokens

    def extend(self, reservation: Reservation, tokens: int) -> None:
        self._tokens.extend(reservation.tenant, tokens)
        reservation.tokens += tokens

    def starts(self, reservation: Reservation) -> None:
        if reservation.eviction is None:
            self._running.add(reservation)
            for shares in (self._places, self._tokens):
                shares.started(reservation.tenant, reservation)

    def give_back(self, reservation: Reservation) -> None:
        self._places.remove(reservation.tenant, reservation, 1)
        self._tokens.remove(reservation.tenant, reservation, reservation.tokens)
        self._running.discard(reservation)
        if reservation.progress is not None and reservation.progress.num_tokens:
            used = reservation.progress.num_tokens / reservation.max_output
            self._fraction_used += _SMOOTHING * (used - self._fraction_used)

    def _take(self, shares: Shares[Reservation], reservation: Reservation, amount: int, already: int = 0) -> None:
        """Give an amount to a request, and evict others if it needs their room. Raises ResourceExhausted."""
        tenant = reservation.tenant
        evicted: list[Reservation] = []
        freed = 0
        while not shares.has_room(tenant, amount, already) and (freed < amount or shares.total + amount > shares.most):
            victim = shares.displaced_by(tenant, amount)
            if victim is None:
                for each in reversed(evicted):
                    shares.add(each.tenant, each, self._held(shares, each))
                raise self._full(shares, tenant, amount)
            evicted.append(victim)
            freed += self._held(shares, victim)
            shares.remove(victim.tenant, victim, self._held(shares, victim))
        shares.add(tenant, reservation, amount)
        other = self._places if shares is self._tokens else self._tokens
        for each in evicted:
            other.remove(each.tenant, each, self._held(other, each))
            each.evict(self._refused("the queue is full: a tenant that holds less was admitted instead", "EVICTED"))

    def _held(self, shares: Shares[Reservation], reservation: Reservation) -> int:
        return reservation.tokens if shares is self._tokens else 1

    def _full(self, shares: Shares[Reservation], tenant: str, amount: int) -> ResourceExhausted:
        # How many tokens are reserved in all would show a tenant how long the prompts of others are.
        if shares.total + amount <= shares.most:
            taken = f"{shares.total} requests are admitted" if shares is self._places else "tokens are reserved"
            why = f"{taken}, {shares.held_by(tenant)} of them for this tenant; what is left is for others"
        elif shares is self._places:
            why = f"{shares.total} requests are admitted, the limit is {shares.most}"
        else:
            why = f"there is no room for {amount} more tokens, the limit is {shares.most}"
        return self._refused(f"the queue is full: {why}")

    def _refused(self, message: str, reason: str = "QUEUE_FULL") -> ResourceExhausted:
        return ResourceExhausted(message, retry_after_s=self._retry_after_s(), queue_depth=self.requests, reason=reason)

    def _retry_after_s(self) -> float:
        now = self._clock()
        if now >= self._retry_good_until:
            self._retry_good_until = now + _RETRY_GOOD_S
            low, high = _RETRY_AFTER_S
            ends_in = [left for each in self._running if (left := self._time_left_s(each, now)) is not None]
            self._retry_s = float(f"{min(max(min(ends_in), low), high):.1g}") if ends_in else _UNKNOWN_RETRY_S
        return self._retry_s

    def _time_left_s(self, reservation: Reservation, now: float) -> float | None:
        """How long a request likely runs on; None if that is unknown, because its output has hardly begun."""
        progress = reservation.progress
        if progress is None or progress.first_written is None or (done := progress.num_tokens) < 2:
            return None
        left = self._fraction_used * max(0, reservation.max_output - done)
        return left * (now - progress.first_written) / (done - 1)


class Abortable(Protocol):
    def abort(self) -> None:
        """Ask the engine to end all sequences of a request."""


class LiveRequest:
    """An admitted request that has not ended."""

    def __init__(self) -> None:
        # None while the prompt is being tokenized
        self.stream: Abortable | None = None
        self.is_aborted = False


class LiveRequests:
    """The live requests of this router, by tenant and id: one tenant's ids say nothing of another's."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str], LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, tenant: str, request_id: str) -> LiveRequest:
        """Register a request. Raises AlreadyExists."""
        if (tenant, request_id) in self._requests:
            raise AlreadyExists("request_id: a live request has this id")
        self._idle.clear()
        live = self._requests[tenant, request_id] = LiveRequest()
        return live

    def remove(self, tenant: str, request_id: str) -> None:
        # Its stream knows what the call holds, which knows this: the collector of cycles would hold up other streams.
        self._requests.pop((tenant, request_id)).stream = None
        if not self._requests:
            self._idle.set()

    def abort(self, tenant: str, request_id: str) -> None:
        """End a request; its stream finishes as CANCELLED. Raises NotFound."""
        if (live := self._requests.get((tenant, request_id))) is None:
            raise NotFound("request_id: no live request has this id")
        live.is_aborted = True
        if live.stream:
            live.stream.abort()

    def abort_all(self) -> None:
        for tenant, request_id in list(self._requests):
            self.abort(tenant, request_id)

    async def wait_idle(self) -> None:
        await self._idle.wait()
