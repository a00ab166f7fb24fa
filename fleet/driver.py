"""The driver of a fleet: keeps as many engines and routers as wanted, and names the engines to routers in a file.

It sees engines as routers do, through channels of its own on which it sends no requests, and asks their hosts for the
rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..router.engines.channel import EngineChannel
from ..router.engines.fleet import Fleet, Member
from ..router.engines.refusals import WrongEngine
from ..runtime.channel_trust import ENGINE_NAME, ChannelTrust
from ..settings.fleet import Bounds, FleetConfig
from .folder import FleetFolder
from .group import Faults, Group, Hosts, Placed
from .host import MEMBERS_OPTION
from .metrics import Metrics
from .policy import Load, Since, Targets, decide

log = logging.getLogger("pagoda.fleet")

LOOK_S = 1.0


class Driver:
    """
    config   what every engine and router is started with, and how many there are
    hosts    where they run
    folder   what routers follow, and what guards the channel
    metrics  is shown what there is; None: nobody asks
    """

    def __init__(self, config: FleetConfig, hosts: Hosts, folder: FleetFolder, metrics: Metrics | None = None) -> None:
        self.bounds = config.bounds
        self.wanted = self.bounds.least
        self._config = config
        self._hosts = hosts
        self._folder = folder
        self._metrics = metrics
        self._faults = Faults()
        self._engines = Group("engine", hosts, self._faults, self._start_engine, config.grace_s)
        self._routers = Group("router", hosts, self._faults, self._start_router, config.grace_s)
        self._num_routers = config.routers
        self._targets = Targets(
            config.target_ttft_s,
            up_after_s=config.scale_up_s,
            down_after_s=config.scale_down_s,
            idle_after_s=config.scale_to_zero_s,
        )
        self._trust: ChannelTrust = folder.trust()
        self._fleet = Fleet(self._connect)
        self._since = Since()
        self._changes: Counter[str] = Counter()  # of the number of engines, by what asked for them
        self._marks: dict[str, str] = {}  # what was last read of each mark that asks for an engine
        self._hinted = 0
        self._hung: set[Member] = set()  # engines whose loops have not answered for --hang-timeout-s

    @property
    def engines(self) -> dict[str, Placed]:
        return self._engines.placed

    @property
    def routers(self) -> dict[str, Placed]:
        return self._routers.placed

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

        drains  whether all ends then; otherwise engines and routers serve on, and the next driver finds them

        Raises FleetError, HostsError.
        """
        await self._adopt()
        helpers = [asyncio.create_task(self._fleet.run()), asyncio.create_task(self._trust.follow(log))]
        try:
            while not stop.is_set():
                await self._look()
                await self._pause(stop)
            while drains and (self.routers or self.engines):
                self._num_routers = 0
                if not self.routers:  # which let their streams end first
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
        """Take over what an earlier driver has left."""
        names, addresses = await self._hosts.names(), self._folder.members()
        self._engines.adopt(names, addresses)
        self._routers.adopt(names, {})
        if self.engines:
            log.info("found %d engines that serve already", len(self.engines))
            self.wanted = min(max(len(self.engines), self.bounds.least), self.bounds.most)

    async def _look(self) -> None:
        """Look at every engine and router once, and do what that asks for."""
        await self._engines.look()
        await self._routers.look()  # not at once: Ray's head answers one call after the other
        ready = {each.name: each for each in self._fleet.channels if each.takes_requests}
        self._engines.see(lambda each: each.name in ready and ready[each.name].address == each.address)
        self._routers.see(lambda each: bool(each.address) and not each.report.silent_s)
        self._check_versions(ready)
        await self._end_hung()
        self._scale()
        sequences = {channel.name: channel.num_sequences for channel in self._fleet.channels}
        await self._engines.balance(self.wanted, sequences)
        await self._routers.balance(self._num_routers, {})
        members = [Member(each.name, each.address) for each in self._engines.live if each.address]
        self._fleet.set_members(members)
        await self._faults.attempt(self._publish(members), "the file of members")
        await asyncio.gather(*(self._give_members(router) for router in self._routers.live))
        if self._hinted != self.wanted and await self._faults.attempt(self._hosts.hint(self.wanted), "the autoscaler"):
            self._hinted = self.wanted
        if self._metrics is not None:
            self._metrics.show(
                self.wanted, self.bounds, self._engines, self._routers, self._loads(), self._changes, self._faults
            )
        await asyncio.gather(self._engines.end_look(), self._routers.end_look())

    async def _start_engine(self, engine: Placed) -> None:
        files = self._folder.engine_files(engine.name)
        await self._hosts.start(engine.name, self._config.engine_arguments(), files)

    async def _start_router(self, router: Placed) -> None:
        config = self._config
        files = self._folder.router_files() | config.router_files()
        arguments = [*config.router_arguments(), f"--channel-tls-name={ENGINE_NAME}"]
        await self._hosts.start_router(router.name, arguments, files, config.router_port)
        router.members = files[MEMBERS_OPTION]

    async def _publish(self, members: Sequence[Member]) -> None:
        self._folder.write_members(members)

    async def _give_members(self, router: Placed) -> None:
        """Give a router the file of members, if that has changed since it got the last one."""
        content = self._folder.members_file()
        if router.report.pid and router.members != content:
            given = self._hosts.update(router.name, {MEMBERS_OPTION: content})
            if await self._faults.attempt(given, router.name):
                router.members = content

    async def _end_hung(self) -> None:
        """Remove the hosts of what hangs, which would never end by itself. Others take their places."""
        hung = [each for each in self._engines.live if Member(each.name, each.address) in self._hung]
        hung += [each for each in self._routers.live if each.report.silent_s > self._config.hang_timeout_s]
        self._hung.clear()
        for each in hung:
            log.error("%s at %s hangs, and is ended", each.name, each.address)
            if await self._faults.attempt(self._hosts.remove(each.name), each.name):
                each.report = replace(each.report, silent_s=0.0)

    def _check_versions(self, ready: Mapping[str, EngineChannel]) -> None:
        """Give new engines up that routers would not use beside those that they shall replace."""
        old = next((each for each in self._engines.outdated if each.name in ready), None)
        new = [each for each in self._engines.renewed if each.name in ready]
        if old is None or not new or (before := ready[old.name].identity) is None:
            return
        for engine in new:
            try:
                (ready[engine.name].identity or before).check_fits(before, mixes=False)
            except WrongEngine as error:
                self._engines.give_up_new(engine, f"{engine.name}: {error}")

    # -- how many ---------------------------------------------------------------------------------------------------

    def _loads(self) -> list[Load]:
        serving = {each.name for each in self._engines.live if each.ready_since is not None}
        return [load_of(channel) for channel in self._fleet.channels if channel.name in serving]

    def _scale(self) -> None:
        """Adapt the number of engines to their load, within the bounds."""
        is_asked = self._is_asked()
        if self._engines.outdated:  # an upgrade changes the number itself
            self._since = Since()
            return
        loads, may_be_none = self._loads(), self.bounds.least == 0
        num_coming = max(len(self._engines.live), self.wanted) - len(loads)
        self._since, change = decide(
            self._since, self._targets, time.monotonic(), loads, num_coming, may_be_none=may_be_none
        )
        if is_asked and not self.wanted:
            self._want(1, "request")
        else:
            self._want(self.wanted + change, "load")

    def _want(self, number: int, reason: str) -> None:
        wanted = min(max(number, self.bounds.least), self.bounds.most)
        if wanted != self.wanted:
            log.info("%d engines are wanted, not %d", wanted, self.wanted)
            self._changes[reason] += 1
            self.wanted = wanted

    def _is_asked(self) -> bool:
        """Whether a router has written its mark since the last look: a request waits there for an engine."""
        marks = {"": self._folder.mark()} | {each.name: each.report.mark for each in self.routers.values()}
        before, self._marks = self._marks, marks
        return any(mark and before.get(name, mark) != mark for name, mark in marks.items())

    # -- commands ---------------------------------------------------------------------------------------------------

    async def answer(self, command: str, argument: str) -> dict[str, Any]:
        """Do what a command asks, and return what it prints. Raises ValueError."""
        match command:
            case "status":
                return self._status()
            case "scale":
                self.bounds = Bounds.of(argument)
                self._want(self.wanted, "command")
                return {"wanted": self.wanted, "bounds": str(self.bounds)}
            case "drain":
                await self._drain(argument)
                return {"drained": argument}
            case "upgrade":
                return {"replaced": await self._engines.upgrade() + await self._routers.upgrade()}
        raise ValueError(f"this driver does not know the command {command[:40]!r}")

    def _status(self) -> dict[str, Any]:
        loads = {channel.name: load_of(channel) for channel in self._fleet.channels}
        engines = [
            _described(each)
            | {
                "sequences": loads[each.name].num_sequences if each.name in loads else 0,
                "uncomputed_tokens": loads[each.name].uncomputed_tokens if each.name in loads else 0,
            }
            for each in _in_order(self.engines.values())
        ]
        routers = [_described(each) | {"http": each.report.http} for each in _in_order(self.routers.values())]
        return {"wanted": self.wanted, "bounds": str(self.bounds), "engines": engines, "routers": routers}

    async def _drain(self, name: str) -> None:
        for group in (self._engines, self._routers):
            if name in group.placed:
                await group.drain(name)
                return
        known = ", ".join(sorted((*self.engines, *self.routers))) or "none runs"
        raise ValueError(f"there is no engine or router {name[:64]!r}: {known}")


def _in_order(placed: Iterable[Placed]) -> list[Placed]:
    return sorted(placed, key=lambda each: (len(each.name), each.name))


def _described(placed: Placed) -> dict[str, Any]:
    return {
        "name": placed.name,
        "state": placed.state,
        "node": placed.report.node,
        "address": placed.address,
        "pid": placed.report.pid,
        "version": placed.report.version,
        "last_line": "".join(placed.report.log[-1:])[:300],
    }


def load_of(channel: EngineChannel) -> Load:
    """What an engine has last said of its load."""
    load = channel.sequences.load
    return Load(
        channel.num_sequences, channel.max_num_seqs, channel.num_uncomputed, load.prefill_tokens_per_s, load.steps
    )
