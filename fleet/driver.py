"""The driver of a fleet: keeps as many engines as wanted, and names them to routers in a file.

It sees engines as routers do, through channels of its own on which it sends no requests, and asks their hosts for the
rest. A host that does not answer changes nothing: its engine stays a member until it is known to have ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ..router.engines.channel import EngineChannel
from ..router.engines.fleet import Fleet, Member
from ..router.engines.refusals import WrongEngine
from ..runtime.authority import CertsError
from ..runtime.channel_trust import ChannelTrust
from ..settings import EXIT_CONFIG
from ..settings.fleet import Bounds, FleetConfig
from .folder import FleetFolder
from .host import Report, State
from .policy import Load, Since, Targets, decide

log = logging.getLogger("pagoda.fleet")

LOOK_S = 1.0
SETTLES_S = 2.0  # after an engine is ready: routers read the file of members within a second, and greet the engine
BACKOFF_S = (1.0, 60.0)
HEALTHY_AFTER_S = 60.0  # an engine that dies after this long has a new cause: the backoff starts over
SILENT_S = 30.0  # beyond its --grace-s, an engine that leaves has ended if its host is silent
MOST_FAILED_STARTS = 3  # of an engine that is to take another one's place, before that is given up
REPLACED = -1  # the generation of an engine that another one shall replace, whatever the version


_SHOWN = {State.EMPTY: "waits for a machine", State.GONE: "waits for a machine", State.ENDED: "ended"}


class HostsError(Exception):
    """Whatever places hosts, or a host, does not do what it was asked. The message says why."""


class FleetError(Exception):
    """The fleet cannot work. The message says why."""


class Hosts(Protocol):
    """Where engines run. Each host has a name and runs one engine. All methods raise HostsError."""

    async def names(self) -> list[str]: ...

    async def place(self, name: str) -> None: ...

    async def remove(self, name: str) -> None: ...

    async def hint(self, num_engines: int) -> None: ...

    async def start(self, name: str, arguments: Sequence[str], files: Mapping[str, bytes]) -> None: ...

    async def drain(self, name: str) -> None: ...

    async def report(self, name: str) -> Report | None: ...


@dataclass(slots=True, eq=False)
class Engine:
    """One engine of the fleet, on the host of its name.

    generation   of the version that it was started with: an upgrade replaces older ones
    report       what its host has said last
    is_leaving   it gets nothing new, and ends
    is_drained   its host has been asked to end it
    ready_since  on the monotonic clock; None: it does not take requests
    ends_by      on that clock: it is removed then, if it leaves and its host is silent
    starts_at    on that clock: it is started again then, if it has failed; 0: it has not
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


class Driver:
    """
    config  what every engine is started with, and how many there are
    hosts   where they run
    folder  what routers follow, and what guards the channel
    """

    def __init__(self, config: FleetConfig, hosts: Hosts, folder: FleetFolder) -> None:
        self.bounds = config.bounds
        self.wanted = self.bounds.least
        self.engines: dict[str, Engine] = {}
        self._config = config
        self._hosts = hosts
        self._folder = folder
        self._targets = Targets(config.target_ttft_s, up_after_s=config.scale_up_s, down_after_s=config.scale_down_s)
        self._trust: ChannelTrust = folder.trust()
        self._fleet = Fleet(self._connect)
        self._since = Since()
        self._generation = 0
        self._fault_of_new = ""
        self._hinted = 0
        self._faults: dict[str, str] = {}  # what was logged last, by what it is about
        self._hung: set[Member] = set()  # engines whose loops have not answered for --hang-timeout-s
        self._looked = asyncio.Condition()

    def _connect(self, member: Member, number: int) -> EngineChannel:
        async def change() -> None:
            """Do nothing: the next look sees it."""

        return EngineChannel(
            member.address,
            name=member.name,
            number=number,
            hang_timeout_s=self._config.hang_timeout_s,
            on_change=change,
            on_hang=partial(self._hung.add, member),
            trust=self._trust,
        )

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event, *, drains: bool) -> None:
        """Keep the fleet until `stop` is set.

        drains  whether the engines end then; otherwise they serve on, and the next driver finds them

        Raises FleetError, HostsError.
        """
        await self._adopt()
        helpers = [asyncio.create_task(self._fleet.run()), asyncio.create_task(self._trust.follow(log))]
        try:
            while not stop.is_set():
                await self._look()
                await self._pause(stop)
            while drains and self.engines:
                self.bounds, self.wanted = Bounds(0, 0), 0
                await self._look()
                await asyncio.sleep(LOOK_S / 4)
        finally:
            for helper in helpers:
                helper.cancel()

    async def _pause(self, stop: asyncio.Event) -> None:
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait([waiting], timeout=LOOK_S)
        waiting.cancel()

    async def _adopt(self) -> None:
        """Take over the engines that an earlier driver has left. Their addresses hold until their hosts answer."""
        addresses = self._folder.members()
        for name in await self._hosts.names():
            self.engines[name] = Engine(name, self._generation, address=addresses.get(name, ""))
        if self.engines:
            log.info("found %d engines that serve already", len(self.engines))
            self.wanted = min(max(len(self.engines), self.bounds.least), self.bounds.most)

    async def _look(self) -> None:
        """Look at every engine once, and do what that asks for."""
        engines = list(self.engines.values())
        for engine, report in zip(
            engines, await asyncio.gather(*(self._hosts.report(each.name) for each in engines)), strict=True
        ):
            if report is not None:
                await self._take_in(engine, report)
            elif engine.is_leaving and (not engine.report.node or time.monotonic() > engine.ends_by):
                await self._remove(engine)  # it was never placed, or its machine is lost
        self._see_channels()
        await self._end_hung()
        self._scale()
        await self._balance()
        members = [Member(each.name, each.address) for each in self._live if each.address]
        self._fleet.set_members(members)
        await self._attempt(self._publish(members), "the file of members")
        if self._hinted != self.wanted and await self._attempt(self._hosts.hint(self.wanted), "the autoscaler"):
            self._hinted = self.wanted
        async with self._looked:
            self._looked.notify_all()

    async def _take_in(self, engine: Engine, report: Report) -> None:
        if report.warning and report.warning != engine.report.warning:
            log.warning("%s: %s", report.node, report.warning)
        engine.report = report
        engine.address = report.address if report.state in (State.SERVING, State.DRAINING) else ""
        is_over = report.state in (State.EMPTY, State.ENDED, State.GONE)
        if engine.is_leaving:
            if is_over:
                await self._remove(engine)
            elif not engine.is_drained:
                engine.is_drained = await self._attempt(self._hosts.drain(engine.name), engine.name)
            return
        if report.state is State.GONE:
            log.warning("%s has lost its host", engine.name)
            await self._attempt(self._hosts.place(engine.name), "placing")
            return
        if report.state is State.ENDED and not engine.starts_at:
            self._judge(engine, report)
        is_due = is_over and time.monotonic() >= engine.starts_at
        if is_due and await self._attempt(self._start(engine), engine.name):
            log.info("%s starts on %s", engine.name, report.node)
            engine.starts_at = 0.0

    async def _start(self, engine: Engine) -> None:
        files = self._folder.engine_files(engine.name)
        await self._hosts.start(engine.name, self._config.engine_arguments(), files)

    def _judge(self, engine: Engine, report: Report) -> None:
        """Note that an engine has ended by itself, and when it is started again.

        Raises FleetError if that is no use.
        """
        last = next((line for line in reversed(report.log) if line.startswith("error: ")), "".join(report.log[-1:]))
        log.error("%s on %s ended with %s: %s", engine.name, report.node, report.exit_code, last)
        if report.exit_code == EXIT_CONFIG and not any(each.has_been_ready for each in self.engines.values()):
            raise FleetError(last.removeprefix("error: "))
        engine.num_failures += 1
        pause_s = min(BACKOFF_S[0] * 2 ** (engine.num_failures - 1), BACKOFF_S[1])
        engine.starts_at = time.monotonic() + pause_s
        if engine.num_failures >= MOST_FAILED_STARTS and not engine.has_been_ready:
            self._give_up_new(engine, f"{engine.name} does not start: {last}")

    def _see_channels(self) -> None:
        """Note which engines take requests, as a router would."""
        now = time.monotonic()
        ready = {each.name: each for each in self._fleet.channels if each.takes_requests}
        for engine in self.engines.values():
            if (channel := ready.get(engine.name)) is None or channel.address != engine.address:
                engine.ready_since = None
            elif engine.ready_since is None:
                engine.ready_since, engine.has_been_ready = now, True
                log.info("%s serves at %s", engine.name, engine.address)
            elif now - engine.ready_since > HEALTHY_AFTER_S:
                engine.num_failures = 0
        self._check_versions(ready)

    async def _end_hung(self) -> None:
        """Remove the hosts of engines that hang, which would never end by themselves. Others take their places."""
        hung = self._hung.copy()
        self._hung.clear()
        for engine in self._live:
            if Member(engine.name, engine.address) in hung:
                log.error("%s at %s hangs, and is ended", engine.name, engine.address)
                await self._attempt(self._hosts.remove(engine.name), engine.name)

    def _check_versions(self, ready: Mapping[str, EngineChannel]) -> None:
        """Give new engines up that routers would not use beside those that they shall replace."""
        old = next((each for each in self._outdated if each.name in ready), None)
        new = [each for each in self._live if each.generation == self._generation and each.name in ready]
        if old is None or not new or (before := ready[old.name].identity) is None:
            return
        for engine in new:
            try:
                (ready[engine.name].identity or before).check_fits(before, mixes=False)
            except WrongEngine as error:
                self._give_up_new(engine, f"{engine.name}: {error}")

    # -- how many ---------------------------------------------------------------------------------------------------

    @property
    def _live(self) -> list[Engine]:
        return [each for each in self.engines.values() if not each.is_leaving]

    @property
    def _outdated(self) -> list[Engine]:
        return [each for each in self._live if each.generation != self._generation]

    def _scale(self) -> None:
        """Adapt the number of engines to their load, within the bounds."""
        if self._outdated:  # an upgrade changes the number itself
            self._since = Since()
            return
        serving = {each.name for each in self._live if each.ready_since is not None}
        loads = [load_of(channel) for channel in self._fleet.channels if channel.name in serving]
        num_coming = max(len(self._live), self.wanted) - len(loads)
        self._since, change = decide(self._since, self._targets, time.monotonic(), loads, num_coming)
        wanted = min(max(self.wanted + change, self.bounds.least), self.bounds.most)
        if wanted != self.wanted:
            log.info("%d engines are wanted, not %d", wanted, self.wanted)
            self.wanted = wanted

    async def _balance(self) -> None:
        """Place engines that are missing, and let those end that are too many or replaced."""
        now = time.monotonic()
        outdated = self._outdated
        target = self.wanted + bool(outdated)  # one more than wanted, while others take the place of older ones
        while len(self._live) < target and await self._place():
            pass
        settled = [each for each in self._live if each.ready_since is not None and now - each.ready_since > SETTLES_S]
        if len(self._live) > target:
            for engine in self._least_useful()[: len(self._live) - target]:
                self._leave(engine)
        elif outdated and len(settled) == target:
            self._leave(outdated[0])

    def _least_useful(self) -> list[Engine]:
        """Engines in the order in which they end: older versions, those that do not serve, and the least loaded."""
        loads = {channel.name: channel.num_sequences for channel in self._fleet.channels}
        return sorted(
            self._live,
            key=lambda each: (
                each.generation == self._generation,
                each.ready_since is not None,
                loads.get(each.name, 0),
                each.name,
            ),
        )

    async def _place(self) -> bool:
        number = next(number for number in range(1, len(self.engines) + 2) if f"engine-{number}" not in self.engines)
        engine = Engine(f"engine-{number}", self._generation)
        is_placed = await self._attempt(self._hosts.place(engine.name), "placing")
        if is_placed:
            self.engines[engine.name] = engine
        return is_placed

    def _leave(self, engine: Engine) -> None:
        log.info("%s leaves", engine.name)
        engine.is_leaving, engine.ends_by = True, time.monotonic() + self._config.grace_s + SILENT_S

    async def _remove(self, engine: Engine) -> None:
        if await self._attempt(self._hosts.remove(engine.name), engine.name):
            del self.engines[engine.name]
            log.info("%s has ended", engine.name)

    async def _publish(self, members: Sequence[Member]) -> None:
        self._folder.write_members(members)

    async def _attempt(self, work: Awaitable[None], about: str) -> bool:
        """Whether something succeeds that hosts or disks may refuse. The next look tries again.

        The same fault is logged once.
        """
        try:
            await work
        except (HostsError, CertsError, OSError) as error:
            if self._faults.get(about) != str(error):
                log.warning("%s: %s", about, error)
            self._faults[about] = str(error)
            return False
        self._faults.pop(about, None)
        return True

    # -- commands ---------------------------------------------------------------------------------------------------

    async def answer(self, command: str, argument: str) -> dict[str, Any]:
        """Do what a command asks, and return what it prints. Raises ValueError."""
        match command:
            case "status":
                return self._status()
            case "scale":
                self.bounds = Bounds.of(argument)
                self.wanted = min(max(self.wanted, self.bounds.least), self.bounds.most)
                return {"wanted": self.wanted, "bounds": str(self.bounds)}
            case "drain":
                await self._drain(argument)
                return {"drained": argument}
            case "upgrade":
                return {"replaced": await self._upgrade()}
        raise ValueError(f"this driver does not know the command {command[:40]!r}")

    def _status(self) -> dict[str, Any]:
        loads = {channel.name: channel.outlook for channel in self._fleet.channels}
        engines = [
            {
                "name": each.name,
                "state": self._state(each),
                "node": each.report.node,
                "address": each.address,
                "pid": each.report.pid,
                "version": each.report.version,
                "sequences": loads.get(each.name, (0, 0, 0.0))[0],
                "uncomputed_tokens": loads.get(each.name, (0, 0, 0.0))[1],
                "last_line": "".join(each.report.log[-1:])[:300],
            }
            for each in sorted(self.engines.values(), key=lambda each: (len(each.name), each.name))
        ]
        return {"wanted": self.wanted, "bounds": str(self.bounds), "engines": engines}

    def _state(self, engine: Engine) -> str:
        if engine.is_leaving:
            return "leaving"
        if engine.ready_since is not None:
            return "serving"
        return _SHOWN.get(engine.report.state, "starting")

    async def _drain(self, name: str) -> None:
        """Let an engine end once another one serves in its place, and wait until it has.

        Raises ValueError if there is none of that name, or if the other one does not serve.
        """
        engine = self.engines.get(name)
        if engine is None:
            raise ValueError(f"there is no engine {name[:64]!r}: {', '.join(sorted(self.engines)) or 'none runs'}")
        engine.generation = REPLACED
        await self._until(lambda: self.engines.get(name) is not engine or engine.generation != REPLACED)
        if self.engines.get(name) is engine:
            raise ValueError(f"{name} serves on: {self._fault_of_new}")

    async def _upgrade(self) -> int:
        """Replace every engine by one of the version that is installed now, one after the other.

        Return how many were replaced. Raises ValueError if the new ones do not serve: the old ones stay then.
        """
        if self._outdated:
            raise ValueError("engines are being replaced already")
        self._generation, self._fault_of_new = self._generation + 1, ""
        num_replaced = len(self._live)
        await self._until(lambda: not self._outdated)
        if self._fault_of_new:
            raise ValueError(f"the former engines serve on: {self._fault_of_new}")
        return num_replaced

    def _give_up_new(self, engine: Engine, fault: str) -> None:
        """Let an engine leave that cannot take another one's place; those that it should have replaced stay."""
        if outdated := self._outdated:
            log.error("no engine is replaced: %s", fault)
            self._fault_of_new = fault
            self._leave(engine)
            for each in outdated:
                each.generation = self._generation

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with self._looked:
            await self._looked.wait_for(is_so)


def load_of(channel: EngineChannel) -> Load:
    """What an engine has last said of its load."""
    num_sequences, uncomputed_tokens, prefill_tokens_per_s = channel.outlook
    return Load(num_sequences, channel.max_num_seqs, uncomputed_tokens, prefill_tokens_per_s)
