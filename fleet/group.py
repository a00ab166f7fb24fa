"""The engines or the routers of a fleet: each on a host of its name, started again when it ends, replaced when asked.

A host that does not answer changes nothing: what runs there is not replaced until it is known to have ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..runtime.authority import CertsError
from ..settings import EXIT_CONFIG
from .host import Report, State

log = logging.getLogger("pagoda.fleet")

SETTLES_S = 2.0  # after an engine is ready: routers read the file of members within a second, and greet the engine
BACKOFF_S = (1.0, 60.0)
HEALTHY_AFTER_S = 60.0  # a process that dies after this long has a new cause: the backoff starts over
SILENT_S = 30.0  # beyond its --grace-s, a process that leaves has ended if its host is silent
MOST_FAILED_STARTS = 3  # of a process that is to take another one's place, before that is given up
REPLACED = -1  # the generation of a process that another one shall replace, whatever the version
STATES = ("serving", "starting", "waits for a machine", "ended", "leaving")
_SHOWN = {State.EMPTY: "waits for a machine", State.GONE: "waits for a machine", State.ENDED: "ended"}


class HostsError(Exception):
    """Whatever places hosts, or a host, does not do what it was asked. The message says why."""


class FleetError(Exception):
    """The fleet cannot work. The message says why."""


class Hosts(Protocol):
    """Where engines and routers run. Each host has a name and runs one of them. All methods raise HostsError."""

    async def names(self) -> list[str]: ...

    async def place(self, name: str) -> None: ...

    async def remove(self, name: str) -> None: ...

    async def hint(self, num_engines: int) -> None: ...

    async def start(self, name: str, arguments: Sequence[str], files: Mapping[str, bytes]) -> None: ...

    async def start_router(
        self, name: str, arguments: Sequence[str], files: Mapping[str, bytes], port: int
    ) -> None: ...

    async def update(self, name: str, files: Mapping[str, bytes]) -> None: ...

    async def drain(self, name: str) -> None: ...

    async def report(self, name: str) -> Report | None: ...


@dataclass(slots=True, eq=False)
class Placed:
    """An engine or a router, on the host of its name.

    generation   of the version that it was started with: an upgrade replaces older ones
    report       what its host has said last
    is_leaving   it gets nothing new, and ends
    is_drained   its host has been asked to end it
    ready_since  on the monotonic clock; None: it does not take requests
    ends_by      on that clock: it is removed then, if it leaves and its host is silent
    starts_at    on that clock: it is started again then, if it has failed; 0: it has not
    members      the file of members that a router has been given
    """

    name: str
    generation: int
    report: Report = field(default_factory=Report)
    address: str = ""
    is_leaving: bool = False
    is_drained: bool = False
    ready_since: float | None = None
    has_been_ready: bool = False
    ends_by: float = 0.0
    num_failures: int = 0
    starts_at: float = 0.0
    members: bytes = b""

    @property
    def state(self) -> str:
        """One of STATES."""
        if self.is_leaving:
            return "leaving"
        if self.ready_since is not None:
            return "serving"
        return _SHOWN.get(self.report.state, "starting")


class Faults:
    """What hosts or disks refuse. Each fault is logged once.

    current  by what it is about, until that succeeds
    """

    def __init__(self) -> None:
        self.current: dict[str, str] = {}

    async def attempt(self, work: Awaitable[None], about: str) -> bool:
        """Whether something succeeds. The next look tries again."""
        try:
            await work
        except (HostsError, CertsError, OSError) as error:
            if self.current.get(about) != str(error):
                log.warning("%s: %s", about, error)
            self.current[about] = str(error)
            return False
        self.current.pop(about, None)
        return True


class Group:
    """
    kind     of its members, whose names are that and a number
    start    starts one on its host. Raises HostsError, CertsError, OSError
    grace_s  how long one that leaves may take to end

    placed        by name
    num_restarts  how often members were started again that had ended by themselves
    """

    def __init__(
        self, kind: str, hosts: Hosts, faults: Faults, start: Callable[[Placed], Awaitable[None]], grace_s: float
    ) -> None:
        self.placed: dict[str, Placed] = {}
        self.num_restarts = 0
        self._kind = kind
        self._hosts = hosts
        self._faults = faults
        self._start = start
        self._grace_s = grace_s
        self._generation = 0
        self._fault_of_new = ""
        self._has_served = False
        self._looked = asyncio.Condition()

    @property
    def live(self) -> list[Placed]:
        return [each for each in self.placed.values() if not each.is_leaving]

    @property
    def outdated(self) -> list[Placed]:
        """Those that others shall replace."""
        return [each for each in self.live if each.generation != self._generation]

    @property
    def renewed(self) -> list[Placed]:
        return [each for each in self.live if each.generation == self._generation]

    def states(self) -> dict[str, int]:
        """How many there are in each state."""
        found = [each.state for each in self.placed.values()]
        return {state: found.count(state) for state in STATES}

    # -- a look -----------------------------------------------------------------------------------------------------

    def adopt(self, names: Iterable[str], addresses: Mapping[str, str]) -> None:
        """Take over what an earlier driver has left. The addresses hold until hosts answer."""
        for name in names:
            if name.startswith(f"{self._kind}-"):
                self.placed[name] = Placed(name, self._generation, address=addresses.get(name, ""))

    async def look(self) -> None:
        """Ask every host, and start what has ended. Raises FleetError."""
        placed = list(self.placed.values())
        reports = await asyncio.gather(*(self._hosts.report(each.name) for each in placed))
        for each, report in zip(placed, reports, strict=True):
            if report is not None:
                await self._take_in(each, report)
            elif each.is_leaving and (not each.report.node or time.monotonic() > each.ends_by):
                await self._remove(each)  # it was never placed, or its machine is lost

    def see(self, is_ready: Callable[[Placed], bool]) -> None:
        """Note which of them serve."""
        now = time.monotonic()
        for each in self.placed.values():
            if not is_ready(each):
                each.ready_since = None
            elif each.ready_since is None:
                each.ready_since, each.has_been_ready, self._has_served = now, True, True
                log.info("%s serves at %s", each.name, each.address)
            elif now - each.ready_since > HEALTHY_AFTER_S:
                each.num_failures = 0

    async def balance(self, wanted: int, loads: Mapping[str, int]) -> None:
        """Place what is missing, and let those end that are too many or replaced.

        loads  the sequences of each, by name
        """
        now = time.monotonic()
        outdated = self.outdated
        target = wanted + bool(outdated)  # one more than wanted, while others take the place of older ones
        while len(self.live) < target and await self._place():
            pass
        settled = [each for each in self.live if each.ready_since is not None and now - each.ready_since > SETTLES_S]
        if len(self.live) > target:
            for each in self._least_useful(loads)[: len(self.live) - target]:
                self._leave(each)
        elif outdated and len(settled) == target:
            self._leave(outdated[0])

    async def end_look(self) -> None:
        """Have those look who wait for something."""
        async with self._looked:
            self._looked.notify_all()

    async def _take_in(self, placed: Placed, report: Report) -> None:
        if report.warning and report.warning != placed.report.warning:
            log.warning("%s: %s", report.node, report.warning)
        placed.report = report
        placed.address = report.address if report.state in (State.SERVING, State.DRAINING) else ""
        is_over = report.state in (State.EMPTY, State.ENDED, State.GONE)
        if placed.is_leaving:
            if is_over:
                await self._remove(placed)
            elif not placed.is_drained:
                placed.is_drained = await self._faults.attempt(self._hosts.drain(placed.name), placed.name)
            return
        if report.state is State.GONE:
            log.warning("%s has lost its host", placed.name)
            await self._faults.attempt(self._hosts.place(placed.name), "placing")
            return
        if report.state is State.ENDED and not placed.starts_at:
            self._judge(placed, report)
        is_due = is_over and time.monotonic() >= placed.starts_at
        if is_due and await self._faults.attempt(self._start(placed), placed.name):
            log.info("%s starts on %s", placed.name, report.node)
            self.num_restarts += placed.starts_at > 0
            placed.starts_at = 0.0

    def _judge(self, placed: Placed, report: Report) -> None:
        """Note that one has ended by itself, and when it is started again.

        Raises FleetError if that is no use.
        """
        last = next((line for line in reversed(report.log) if line.startswith("error: ")), "".join(report.log[-1:]))
        log.error("%s on %s ended with %s: %s", placed.name, report.node, report.exit_code, last)
        if report.exit_code == EXIT_CONFIG and not self._has_served:
            raise FleetError(last.removeprefix("error: "))
        placed.num_failures += 1
        pause_s = min(BACKOFF_S[0] * 2 ** (placed.num_failures - 1), BACKOFF_S[1])
        placed.starts_at = time.monotonic() + pause_s
        if placed.num_failures >= MOST_FAILED_STARTS and not placed.has_been_ready:
            self.give_up_new(placed, f"{placed.name} does not start: {last}")

    def _least_useful(self, loads: Mapping[str, int]) -> list[Placed]:
        """The order in which they end: older versions, those that do not serve, and the least loaded."""
        return sorted(
            self.live,
            key=lambda each: (
                each.generation == self._generation,
                each.ready_since is not None,
                loads.get(each.name, 0),
                each.name,
            ),
        )

    async def _place(self) -> bool:
        names = (f"{self._kind}-{number}" for number in range(1, len(self.placed) + 2))
        placed = Placed(next(name for name in names if name not in self.placed), self._generation)
        is_placed = await self._faults.attempt(self._hosts.place(placed.name), "placing")
        if is_placed:
            self.placed[placed.name] = placed
        return is_placed

    def _leave(self, placed: Placed) -> None:
        log.info("%s leaves", placed.name)
        placed.is_leaving, placed.ends_by = True, time.monotonic() + self._grace_s + SILENT_S

    async def _remove(self, placed: Placed) -> None:
        if await self._faults.attempt(self._hosts.remove(placed.name), placed.name):
            del self.placed[placed.name]
            log.info("%s has ended", placed.name)

    # -- replacing --------------------------------------------------------------------------------------------------

    async def drain(self, name: str) -> None:
        """Let one end once another one serves in its place, and wait until it has.

        Raises ValueError if the other one does not serve.
        """
        placed = self.placed[name]
        placed.generation = REPLACED
        await self._until(lambda: self.placed.get(name) is not placed or placed.generation != REPLACED)
        if self.placed.get(name) is placed:
            raise ValueError(f"{name} serves on: {self._fault_of_new}")

    async def upgrade(self) -> int:
        """Replace every one by one of the version that is installed now, one after the other.

        Return how many were replaced. Raises ValueError if the new ones do not serve: the old ones stay then.
        """
        if self.outdated:
            raise ValueError(f"{self._kind}s are being replaced already")
        self._generation, self._fault_of_new = self._generation + 1, ""
        num_replaced = len(self.live)
        await self._until(lambda: not self.outdated)
        if self._fault_of_new:
            raise ValueError(f"the former {self._kind}s serve on: {self._fault_of_new}")
        return num_replaced

    def give_up_new(self, placed: Placed, fault: str) -> None:
        """Let one leave that cannot take another one's place; those that it should have replaced stay."""
        if outdated := self.outdated:
            log.error("no %s is replaced: %s", self._kind, fault)
            self._fault_of_new = fault
            self._leave(placed)
            for each in outdated:
                each.generation = self._generation

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with self._looked:
            await self._looked.wait_for(is_so)
