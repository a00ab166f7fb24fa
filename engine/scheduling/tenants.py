"""Each tenant's share of the engine: its waiting and running sequences, and the service that it received.

Service is counted as in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024), under every policy: one
for a prompt token that is computed, two for an output token. A new token costs nothing here: output tokens are counted
when a table is asked for, and when a sequence moves or ends.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..core.sequence import Sequence, State

PROMPT_WEIGHT = 1  # for a token that is computed; tokens of the prefix cache or of a sibling are free
OUTPUT_WEIGHT = 2
SLICE_S = 1.0
NUM_SLICES = 10  # the window of `recent_service`, which moves by one slice
REFRESH_S = 0.25  # while sequences live, a table is at most this old
MAX_LISTED = 64  # tenants of a table: clients choose the names, so every sequence may have another one
MAX_IDLE = 1024  # tenants without a sequence whose service is kept


def prompt_service(seq: Sequence) -> int:
    """Service of a sequence's first start: its prompt, less what is cached of it.

    A tenant does not pay again for what its sequence loses to others, nor for output that a sequence arrives with.
    """
    return PROMPT_WEIGHT * max(0, seq.request.prompt_len - seq.num_computed)


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """
    service         since the engine started, or since the tenant was forgotten
    recent_service  in the last ten seconds
    """

    name: str
    waiting: int
    running: int
    service: int
    recent_service: int


@dataclass(frozen=True, slots=True)
class TenantTable:
    """
    listed          at most 64 tenants: those with the most recent service, then others that have sequences
    count           how many tenants have sequences or were served in the last ten seconds
    recent_service  of all tenants, in the last ten seconds
    """

    listed: tuple[TenantLoad, ...] = ()
    count: int = 0
    recent_service: int = 0


@dataclass(slots=True)
class _Tenant:
    live: int = 0
    running: int = 0
    service: int = 0


class Tenants:
    """Memory is bounded by the number of live sequences, of tenants served within ten seconds, and MAX_IDLE."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._charged: dict[int, int] = {}  # by live sequence: its output tokens that were charged, or came with it
        self._live: dict[str, _Tenant] = {}
        self._idle: dict[str, _Tenant] = {}  # without a sequence; the longest idle comes first
        self._recent: dict[str, int] = {}  # service within the window: the sum of the slices
        self._slices: deque[dict[str, int]] = deque([{}])
        self._slice_ends = clock() + SLICE_S
        self._table = TenantTable()
        self._table_is_good_until = 0.0

    def arrived(self, seq: Sequence) -> None:
        tenant = self._live.get(seq.request.tenant)
        if tenant is None:
            tenant = self._live[seq.request.tenant] = self._idle.pop(seq.request.tenant, _Tenant())
        tenant.live += 1
        self._charged[seq.id] = seq.output_len

    def moves(self, seq: Sequence, to: State) -> None:
        """Note that a sequence starts or is preempted. Call this before its state changes."""
        if to is State.RUNNING and seq.account.first_scheduled is None:
            self._charge(seq, prompt_service(seq))
        self._count_output(seq)
        self._live[seq.request.tenant].running += 1 if to is State.RUNNING else -1

    def ends(self, seq: Sequence) -> None:
        """Note that a sequence ends. Call this before its state becomes FINISHED."""
        self._count_output(seq)
        del self._charged[seq.id]
        tenant = self._live[seq.request.tenant]
        tenant.live -= 1
        tenant.running -= seq.state is State.RUNNING
        if not tenant.live:
            self._idle[seq.request.tenant] = self._live.pop(seq.request.tenant)
            if len(self._idle) > MAX_IDLE:
                del self._idle[next(iter(self._idle))]

    def table(self, running: Iterable[Sequence]) -> TenantTable:
        """Return the current table; the same object until a new one is made."""
        now = self._clock()
        if self._live and now < self._table_is_good_until:
            return self._table
        for seq in running:
            self._count_output(seq)
        self._move_window()
        self._table_is_good_until = now + REFRESH_S
        names = heapq.nlargest(MAX_LISTED, self._recent, key=self._recent.__getitem__)
        for name in self._live:
            if len(names) == MAX_LISTED:
                break
            if name not in self._recent:
                names.append(name)
        count = len(self._recent.keys() | self._live.keys())
        self._table = TenantTable(tuple(map(self._load, names)), count, sum(self._recent.values()))
        return self._table

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raise AssertionError unless exactly these sequences are counted, each under its tenant and its state."""
        counted = {name: (tenant.live, tenant.running) for name, tenant in self._live.items()}
        expected: dict[str, tuple[int, int]] = {}
        for seq in live:
            num_live, running = expected.get(seq.request.tenant, (0, 0))
            expected[seq.request.tenant] = (num_live + 1, running + (seq.state is State.RUNNING))
        assert counted == expected, f"sequences of tenants: {counted}, not {expected}"
        assert not self._live.keys() & self._idle.keys()
        assert len(self._charged) == sum(num_live for num_live, _ in expected.values())

    def _load(self, name: str) -> TenantLoad:
        tenant = self._live.get(name) or self._idle.get(name) or _Tenant()
        recent = self._recent.get(name, 0)
        return TenantLoad(name, tenant.live - tenant.running, tenant.running, max(tenant.service, recent), recent)

    def _count_output(self, seq: Sequence) -> None:
        if new := seq.output_len - self._charged[seq.id]:
            self._charged[seq.id] += new
            self._charge(seq, OUTPUT_WEIGHT * new)

    def _charge(self, seq: Sequence, service: int) -> None:
        self._move_window()
        if not service:  # a sequence that continues another one; a sum of nothing would leave the window twice
            return
        self._live[seq.request.tenant].service += service
        self._recent[seq.request.tenant] = self._recent.get(seq.request.tenant, 0) + service
        latest = self._slices[-1]
        latest[seq.request.tenant] = latest.get(seq.request.tenant, 0) + service

    def _move_window(self) -> None:
        now = self._clock()
        while self._slice_ends <= now and self._recent:
            self._slice_ends += SLICE_S
            self._slices.append({})
            if len(self._slices) > NUM_SLICES:
                for name, service in self._slices.popleft().items():
                    self._recent[name] -= service
                    if not self._recent[name]:
                        del self._recent[name]
        if self._slice_ends <= now:
            self._slice_ends = now + SLICE_S
