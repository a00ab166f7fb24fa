"""The engines of a router, which join and leave while it runs, and the choice of one for each request."""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from pagoda.v1 import control_pb2

from ...runtime.restarts import keep_running
from ...settings.engine import Role
from ..errors import ConfigError, Unavailable
from .channel import RETRY_AFTER_S, EngineChannel
from .choosing import Asked, Candidates, Chooser, LeastLoaded

log = logging.getLogger("pagoda.router")

LOOKS_AGAIN_S = 0.1  # how often a leaving engine's streams are counted


@dataclass(frozen=True, slots=True)
class Member:
    """An engine that a router uses.

    name     stands for it in metrics, traces and pages, whatever process answers at the address
    address  see channel/address.py
    """

    name: str
    address: str


class Engines(ABC):
    """Engines of one model, and the choice of one of them for each request.

    A Chooser picks. An engine whose answer is late gets nothing while others answer.
    """

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser
        self._kept: dict[bool, Candidates[EngineChannel]] = {}  # by has_begun, while no engine changes
        self._kept_version = -1  # of the chooser's table

    _absence = "the engine is loading or being restarted"

    @property
    @abstractmethod
    def channels(self) -> Sequence[EngineChannel]:
        """Those to all of these engines, in the order in which they joined."""

    @property
    def ready(self) -> list[EngineChannel]:
        """The engines that take requests."""
        return [channel for channel in self.channels if channel.takes_requests]

    def refusal(self) -> Unavailable | None:
        """Why no engine can be picked for a new request now; None: one is ready."""
        try:
            self._keep_candidates(has_begun=False)
        except Unavailable as error:
            return error
        return None

    def _candidates(self, *, has_begun: bool) -> list[EngineChannel]:
        """The ready engines whose role fits, or else those of every role. Raises Unavailable if there are none.

        A new request needs an engine that computes what follows its first token, too.
        """
        ready = self.ready
        if not ready:
            raise self._unavailable(self._absence)
        if {channel.role for channel in ready} == {"both"}:
            return ready
        fitting: dict[Role, list[EngineChannel]] = {}
        roles: tuple[Role, ...] = ("decode",) if has_begun else ("decode", "prefill")
        for role in roles:
            of_role = [channel for channel in ready if channel.role == role]
            fitting[role] = of_role or [channel for channel in ready if channel.role == "both"]
            if not fitting[role]:
                raise self._unavailable(f"no engine with --role {role} is ready, and none with --role both")
        return fitting["decode" if has_begun else "prefill"]

    def _keep_candidates(self, *, has_begun: bool) -> Candidates[EngineChannel]:
        """The candidates whose answers are not late, or else all. They are kept until an engine changes: there may be
        a hundred, and each request asks. Raises Unavailable if there are none.
        """
        if self._kept_version != (version := self.chooser.table.version):
            self._kept.clear()
            self._kept_version = version
        if has_begun not in self._kept:
            self._kept[has_begun] = _prompt_ones(self._candidates(has_begun=has_begun))
        return self._kept[has_begun]

    def _unavailable(self, why: str) -> Unavailable:
        return Unavailable(why, retry_after_s=self.retry_after_s)

    @property
    def retry_after_s(self) -> float | None:
        """How long a client that has lost its engine should wait; None: unknown."""
        if self.ready:
            return RETRY_AFTER_S[0]
        return min((at for channel in self.channels if (at := channel.retry_after_s) is not None), default=None)

    def pick(
        self,
        avoid: Collection[EngineChannel] = (),
        asked: Asked | None = None,
        like: control_pb2.EngineInfo | None = None,
        *,
        mixes: bool = False,
        has_begun: bool = False,
    ) -> EngineChannel:
        """Pick an engine. Raises Unavailable if none is ready.

        avoid  engines that get the request only if no other is ready
        asked  what is known of the request; None: nothing
        like   what an engine reported whose tokens the picked one must continue; None: any may be picked
        mixes  one with the same weights in another precision may continue them if no other is ready
        has_begun  the request has output
        """
        if not avoid and like is None:
            candidates = self._keep_candidates(has_begun=has_begun)
        else:
            ready = self._candidates(has_begun=has_begun)
            if like is not None:
                same = [channel for channel in ready if channel.may_continue(like, mixes=False)]
                ready = same or [channel for channel in ready if mixes and channel.may_continue(like, mixes=True)]
                if not ready:
                    raise self._unavailable("no engine of the same kind is ready")
            candidates = _prompt_ones([channel for channel in ready if channel not in avoid] or ready)
        return candidates[0] if len(candidates) == 1 else self.chooser.choose(candidates, asked)

    def holding(self, adapter: bytes) -> Engines:
        """Those that hold an adapter of this identity; empty: all of them."""
        return EnginesHolding(self, adapter) if adapter else self

    def follow_caches(self) -> None:
        """Have the engines report what their prefix caches hold, if that decides which one gets a request."""
        if self.chooser.follows_caches and len(channels := self.channels) > 1:
            for each in channels:
                each.follow_cache()


def _close(channel: EngineChannel, _: asyncio.Task[None]) -> None:
    channel.close()


def _prompt_ones(engines: list[EngineChannel]) -> Candidates[EngineChannel]:
    """Those whose answers are not late, or else all."""
    return Candidates([engine for engine in engines if not engine.is_suspect] or engines)


class Fleet(Engines):
    """The channels to all engines, which join and leave. Where a router serves one model, they are its engines."""

    def __init__(
        self,
        connect: Callable[[Member, int], EngineChannel],
        chooser: Chooser | None = None,
        *,
        has_one_model: bool = True,
    ) -> None:
        """
        connect        makes the channel to a member; the number is its place among all that have ever joined
        chooser        None: LeastLoaded
        has_one_model  otherwise there are EnginesOf each model
        """
        super().__init__(chooser or LeastLoaded())
        self._channels: list[EngineChannel] = []
        self._connect = connect
        self._has_one_model = has_one_model
        self._numbers = itertools.count()
        self._looks_again: asyncio.TimerHandle | None = None
        self._tasks: dict[EngineChannel, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] | None = None  # set while it runs; ends with the first channel that fails

    @property
    def channels(self) -> list[EngineChannel]:
        return self._channels

    def find(self, number: int) -> EngineChannel | None:
        return next((channel for channel in self.channels if channel.number == number), None)

    # -- who belongs to it ------------------------------------------------------------------------------------------

    def set_members(self, members: Iterable[Member]) -> None:
        """Let engines join and leave until these are the members."""
        wanted = {(member.name, member.address): member for member in members}
        for channel in list(self.channels):  # one without streams leaves at once
            if wanted.pop((channel.name, channel.address), None) is None:
                self._leave(channel)
            else:
                channel.is_leaving = False
                self.chooser.table.changed()
        for member in wanted.values():
            self.join(member)

    def join(self, member: Member) -> None:
        channel = self._connect(member, next(self._numbers))
        self.channels.append(channel)
        self.chooser.table.changed()
        if self._has_one_model:
            self.follow_caches()
        if self._failed is not None:
            log.info("the engine at %s joins", channel.label)
            self._start(channel)

    def _leave(self, channel: EngineChannel) -> None:
        """Give an engine nothing new; its channel is closed once its streams have ended."""
        if not channel.is_leaving:
            log.info("the engine at %s leaves: %d sequences", channel.label, len(channel.sequences))
        channel.is_leaving = True
        self.chooser.table.changed()
        if self._failed is not None and self._looks_again is None:
            self._part()

    async def run(self) -> None:
        """Keep the channels open until cancelled. Raises ConfigError for an address that cannot work here."""
        self._failed = asyncio.get_running_loop().create_future()
        for channel in self.channels:
            self._start(channel)
        self._part()
        try:
            await self._failed
        finally:
            if self._looks_again is not None:
                self._looks_again.cancel()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start(self, channel: EngineChannel) -> None:
        def end(task: asyncio.Task[None]) -> None:
            assert self._failed is not None, "tasks start while it runs"
            if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
                self._failed.set_exception(error)

        name = f"the channel to the engine at {channel.label}"
        running = keep_running(name, channel.run, log, channel.standing, fatal=(ConfigError,))
        self._tasks[channel] = asyncio.create_task(running)
        self._tasks[channel].add_done_callback(end)

    def _part(self) -> None:
        """Close the channels of leaving engines whose streams have ended."""
        self._looks_again = None
        leaving = [channel for channel in self.channels if channel.is_leaving]
        idle = [channel for channel in leaving if not len(channel.sequences)]
        for channel in idle:
            self.channels.remove(channel)
            self.chooser.forget(channel.name)
            self.chooser.table.changed()
            task = self._tasks.pop(channel)
            task.add_done_callback(partial(_close, channel))
            task.cancel()
        if len(idle) < len(leaving):
            self._looks_again = asyncio.get_running_loop().call_later(LOOKS_AGAIN_S, self._part)


class EnginesOf(Engines):
    """The engines of a fleet that have one of its models."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        super().__init__(fleet.chooser)
        self._fleet = fleet
        self._model = model
        self._absence = f"no engine that has the model {model} is ready"

    @property
    def channels(self) -> list[EngineChannel]:
        return [channel for channel in self._fleet.channels if channel.model == self._model]


class EnginesHolding(Engines):
    """The engines among others that hold an adapter of one identity now."""

    _absence = "no engine that is ready holds the adapter"

    def __init__(self, engines: Engines, identity: bytes) -> None:
        super().__init__(engines.chooser)
        self._engines = engines
        self._identity = identity

    @property
    def channels(self) -> list[EngineChannel]:
        return [channel for channel in self._engines.channels if channel.held.holds(self._identity)]

    @property
    def retry_after_s(self) -> float | None:
        return self._engines.retry_after_s
