"""Fair shares for tenants by virtual token counters (Sheng et al., "Fairness in Serving …", OSDI 2024).

A tenant's counter grows by one for each prompt token and by two for each output token, divided by the tenant's weight.
The tenant with the lowest counter is next. No sequence is held back while there is room, so the order is
work-conserving. An idle tenant returns with the lowest counter of the waiting tenants: idling earns no credit.

The service of any two tenants that always have sequences waiting differs, over any time, by at most
2 * max(longest prompt, 2 * KV cache in tokens), divided by the lower weight (theorem 4.4 of the paper).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ..core.sequence import Sequence
from .policy import Policy, PolicySettings, SortedQueue
from .priority import aged_priority
from .tenants import OUTPUT_WEIGHT, prompt_service

MAX_IDLE_TENANTS = 4096  # how many counters are kept; clients choose the names, so there may be any number


class Fair(Policy):
    """Order tenants by their counters, and a tenant's own sequences by aged priority, at no other tenant's cost."""

    def __init__(self, settings: PolicySettings) -> None:
        self.counters: dict[str, float] = {}
        self._weights = settings.tenant_weights
        self._ageing_s = settings.ageing_s
        self._queues: dict[str, SortedQueue] = {}  # one for each tenant that has waiting sequences
        self._len = 0
        # One entry for each tenant in _queues and for some that have left. Counters only grow: none here is too high.
        self._heap: list[tuple[float, str]] = []
        self._in_heap: set[str] = set()
        self._last_left = 0.0  # the counter with which the last tenant left the queue

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for queue in self._queues.values() for seq in queue)

    def add(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        if tenant not in self._queues:
            lowest = self.counters[self._lowest()] if self._queues else self._last_left
            self.counters[tenant] = counter = max(self.counters.get(tenant, 0.0), lowest)
            self._queues[tenant] = SortedQueue()
            if tenant not in self._in_heap:
                self._in_heap.add(tenant)
                heapq.heappush(self._heap, (counter, tenant))
            if len(self.counters) > len(self._queues) + 2 * MAX_IDLE_TENANTS:
                self._forget_the_least_served()
        self._queues[tenant].add(seq, aged_priority(seq, self._ageing_s))
        self._len += 1

    def remove(self, seq: Sequence) -> None:
        queue = self._queues.get(seq.request.tenant)
        if queue is None or not queue.remove(seq):
            return
        self._len -= 1
        if not queue:
            del self._queues[seq.request.tenant]
            self._last_left = self.counters[seq.request.tenant]

    def in_line(self) -> Iterator[Sequence]:
        return iter(self._queues[self._lowest()])

    def started(self, seq: Sequence) -> None:
        if seq.account.preemptions == 0:
            self._charge(seq.request.tenant, prompt_service(seq))

    def token_served(self, seq: Sequence) -> None:
        self._charge(seq.request.tenant, OUTPUT_WEIGHT)

    def rank(self, seq: Sequence) -> float:
        return -self.counters.get(seq.request.tenant, 0.0)

    def _charge(self, tenant: str, tokens: float) -> None:
        self.counters[tenant] = self.counters.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1.0)

    def _lowest(self) -> str:
        """Return the tenant with the lowest counter among those that have waiting sequences."""
        while True:
            stored, tenant = self._heap[0]
            if tenant not in self._queues:
                heapq.heappop(self._heap)
                self._in_heap.remove(tenant)
            elif (counter := self.counters[tenant]) > stored:
                heapq.heapreplace(self._heap, (counter, tenant))
            else:
                return tenant

    def _forget_the_least_served(self) -> None:
        """Drop the lowest idle counters. Such a tenant would mostly return with the lowest waiting counter anyway."""
        idle = sorted((counter, tenant) for tenant, counter in self.counters.items() if tenant not in self._queues)
        for _, tenant in idle[:-MAX_IDLE_TENANTS]:
            del self.counters[tenant]
