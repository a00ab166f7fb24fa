"""Fair shares of tenants by the tokens that they were served: virtual token counters. Standard library only.

"Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). A tenant's counter grows by one for each token of
a prompt and by two for each of an output, divided by its weight; the tenant with the lowest counter is next. Nobody is
held back while there is room, so the order is work-conserving. A tenant that was idle comes back with the lowest
counter of those that wait: idling earns no credit.

Between any two tenants of which somebody waits all the time, what they were served differs, over any time, by at most
2 * max(longest prompt, 2 * KV cache in tokens) (theorem 4.4 there), divided by the lower weight.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.engine.scheduling.policies.policy import PolicySettings
from pagoda_server.engine.scheduling.policies.priority import aged_priority
from pagoda_server.engine.scheduling.policies.sorted_queue import SortedQueue
from pagoda_server.engine.scheduling.tenants import OUTPUT_WEIGHT, prompt_service

MAX_IDLE_TENANTS = 4096  # whose counters are remembered; names are the clients' to choose


class Fair:
    """Tenants by their counters; a tenant's own sequences by priority with ageing, for which no other tenant pays."""

    def __init__(self, settings: PolicySettings) -> None:
        self.counters: dict[str, float] = {}
        self._weights = settings.tenant_weights
        self._ageing_s = settings.ageing_s
        self._queues: dict[str, SortedQueue] = {}  # of tenants of whom somebody waits
        self._len = 0
        # An entry for each tenant in _queues, and for some that have left. Counters only grow: none is stored too high.
        self._heap: list[tuple[float, str]] = []
        self._in_heap: set[str] = set()
        self._last_left = 0.0  # the counter with which the last tenant left the queue

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for queue in self._queues.values() for seq in queue)

    def add(self, seq: Sequence) -> None:
        tenant = seq.tenant
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
        queue = self._queues.get(seq.tenant)
        if queue is None or not queue.remove(seq):
            return
        self._len -= 1
        if not queue:
            del self._queues[seq.tenant]
            self._last_left = self.counters[seq.tenant]

    def in_line(self) -> Iterator[Sequence]:
        return iter(self._queues[self._lowest()])

    def started(self, seq: Sequence) -> None:
        if seq.preemptions == 0:
            self._charge(seq.tenant, prompt_service(seq))

    def token_served(self, seq: Sequence) -> None:
        self._charge(seq.tenant, OUTPUT_WEIGHT)

    def rank(self, seq: Sequence) -> float:
        return -self.counters.get(seq.tenant, 0.0)

    def outranked(self, seq: Sequence, running: list[Sequence]) -> list[Sequence]:
        return []

    def _charge(self, tenant: str, tokens: float) -> None:
        self.counters[tenant] = self.counters.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1.0)

    def _lowest(self) -> str:
        """The tenant with the lowest counter of those of whom somebody waits."""
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
        """They come back with the lowest counter of those that wait, which most of them would have had anyhow."""
        idle = sorted((counter, tenant) for tenant, counter in self.counters.items() if tenant not in self._queues)
        for _, tenant in idle[:-MAX_IDLE_TENANTS]:
            del self.counters[tenant]
