"""How tenants share one of the router's limits: what each holds of it, and which tenant has to give way.

A tenant may hold, for its weight, up to GREED times as much as stays free: dynamic thresholds, from the shared buffers
of switches (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998). A tenant
alone gets nearly everything, 16/17 of the limit. Two that want as much as they can get hold 16/33 each, and so on by
their weights. Something always stays free, so that a tenant that holds nothing finds a place even where every request
is being computed. Such a tenant may take all that is left.

The thresholds take nothing back from a tenant that held much before others came. So a tenant above its threshold, or
without room, displaces what only waits: the newest waiting holder of the tenant that holds the most for its weight. It
does so only if its own tenant then still holds less for its weight than that one does now. Each exchange brings the
two closer to equal, so they cannot take a place from each other in turns. A tenant that holds less than its weighted
share is admitted in this way whenever one that holds more than its own has a holder that waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

GREED = 16
_STALE = 64  # entries of the heap beyond two for each tenant, before it is made anew

Holder = TypeVar("Holder", bound=Hashable)


@dataclass(slots=True)
class _Tenant(Generic[Holder]):
    """
    waiting  the holders that can be displaced, oldest first, and what each holds
    """

    held: int = 0
    waiting: dict[Holder, int] = field(default_factory=dict)


class Shares(Generic[Holder]):
    """A limit and what is held of it. Every operation takes constant or logarithmic time, amortized.

    most   the limit
    total  what all tenants hold

    Tenants that hold nothing are forgotten, so that memory is bounded by the holders.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._tenants: dict[str, _Tenant[Holder]] = {}
        self._weights: Mapping[str, float] | None = None
        # (-held / weight, tenant), the heaviest first. Each tenant that has a waiting holder has an entry here that is
        # not too light; others may be out of date.
        self._heap: list[tuple[float, str]] = []

    def share(self, weights: Mapping[str, float] | None) -> None:
        """Share by these weights from now on; a tenant without one has 1. None: the limit alone counts, as at first."""
        self._weights = weights
        self._renew_heap()

    def held_by(self, tenant: str) -> int:
        return self._tenants[tenant].held if tenant in self._tenants else 0

    def has_room(self, tenant: str, amount: int, already: int = 0) -> bool:
        """Whether a tenant may take an amount without displacing others. already: what its holder holds itself."""
        if self.total + amount > self.most:
            return False
        if self._weights is None or (held := self.held_by(tenant)) <= already:
            return True
        free = self.most - self.total - amount
        return held + amount <= GREED * self._weights.get(tenant, 1.0) * free

    def displaced_by(self, tenant: str, amount: int) -> Holder | None:
        """The holder that gives way first if a tenant is to take an amount; None if none has to."""
        if self._weights is None or (heaviest := self._heaviest()) is None:
            return None
        held = self.held_by(tenant) + amount
        if held / self._weights.get(tenant, 1.0) >= -self._load(heaviest):
            return None
        return next(reversed(self._tenants[heaviest].waiting))

    def add(self, tenant: str, holder: Holder, amount: int) -> None:
        """Give an amount to a holder that waits, whether or not there is room."""
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None:
            of_tenant = self._tenants[tenant] = _Tenant()
        of_tenant.waiting[holder] = of_tenant.waiting.get(holder, 0) + amount
        self.extend(tenant, amount)

    def extend(self, tenant: str, amount: int) -> None:
        """Give an amount to a holder that has started, whether or not there is room. `remove` takes it back too."""
        self._tenants[tenant].held += amount
        self.total += amount
        if self._weights is not None:
            heapq.heappush(self._heap, (self._load(tenant), tenant))
            if len(self._heap) > 2 * len(self._tenants) + _STALE:
                self._renew_heap()

    def started(self, tenant: str, holder: Holder) -> None:
        """Note that a holder no longer waits."""
        if of_tenant := self._tenants.get(tenant):
            of_tenant.waiting.pop(holder, None)

    def remove(self, tenant: str, holder: Holder, amount: int) -> None:
        """Take back everything that a holder holds, which is the amount."""
        if not (of_tenant := self._tenants.get(tenant)):
            return
        of_tenant.held -= amount
        of_tenant.waiting.pop(holder, None)
        self.total -= amount
        if not of_tenant.held and not of_tenant.waiting:
            del self._tenants[tenant]

    def _load(self, tenant: str) -> float:
        assert self._weights is not None
        return -self._tenants[tenant].held / self._weights.get(tenant, 1.0)

    def _heaviest(self) -> str | None:
        """The tenant that holds the most for its weight, among those that have a waiting holder."""
        while self._heap:
            stored, tenant = self._heap[0]
            of_tenant = self._tenants.get(tenant)
            if of_tenant is None or not of_tenant.waiting:
                heapq.heappop(self._heap)
            elif (load := self._load(tenant)) > stored:
                heapq.heapreplace(self._heap, (load, tenant))
            else:
                return tenant
        return None

    def _renew_heap(self) -> None:
        self._heap = []
        if self._weights is not None:
            self._heap = [(self._load(name), name) for name, tenant in self._tenants.items() if tenant.waiting]
            heapq.heapify(self._heap)
