"""Which engines serve together: those whose answers agree, because they have the same weights in the same precision."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagoda.v1 import control_pb2

from .refusals import WrongEngine

log = logging.getLogger("pagoda.router")

SETTLES_S = 1.0  # after the first engine is ready, in which others can vote with theirs for the weights that serve
GONE_S = 60.0  # an engine that has been away for longer is gone for good
FRESH_S = 15.0  # a refused engine tries again within this time


@dataclass(frozen=True, slots=True)
class Identity:
    """What an engine says of itself that changes answers.

    weights    the fingerprint of its weights; empty: it does not say
    precision  None: it does not say
    """

    weights: str
    precision: tuple[str, str, str, bool] | None
    block_size: int

    @classmethod
    def of(cls, info: control_pb2.EngineInfo) -> Identity:
        said = info.precision
        precision = (said.weights, said.dtype, said.kv_cache, said.is_deterministic)
        known = precision if info.HasField("precision") else None
        return cls(info.weights_fingerprint, known, info.kv_cache.block_size)

    @property
    def is_known(self) -> bool:
        return bool(self.weights) and self.precision is not None

    def check_fits(self, other: Identity, *, mixes: bool) -> None:
        """Raise WrongEngine if this engine may not serve beside the other one. What is not known fits.

        mixes  whether engines in several precisions may
        """
        if self.weights and other.weights and self.weights != other.weights:
            raise WrongEngine("weights", "it has other weights than the engines that serve")
        if mixes:
            return
        if self.precision and other.precision and self.precision != other.precision:
            mine, theirs = _described(self.precision), _described(other.precision)
            raise WrongEngine("precision", f"it computes with {mine}, the engines that serve with {theirs}")
        if self.is_known and other.is_known and self.block_size != other.block_size:
            sizes = f"{self.block_size} tokens, the engines that serve of {other.block_size}"
            raise WrongEngine("block_size", f"it has blocks of {sizes}")

    def fits(self, other: Identity, *, mixes: bool) -> bool:
        try:
            self.check_fits(other, mixes=mixes)
        except WrongEngine:
            return False
        return True


def may_continue(engine: control_pb2.EngineInfo, other: control_pb2.EngineInfo, *, mixes: bool = False) -> bool:
    """Whether an engine may continue a stream that another one has begun: answers agree, as far as both say.

    mixes  whether the same weights in another precision will do
    """
    one, two = Identity.of(engine), Identity.of(other)
    if one.is_known or two.is_known:
        return one.weights == two.weights and (mixes or one.precision == two.precision)
    return _likeness(engine) == _likeness(other)


def _likeness(info: control_pb2.EngineInfo) -> tuple[object, ...]:
    """What engines of earlier versions say."""
    precision = info.dtype, info.kernel_backend, info.settings.get("kv_cache_dtype")
    return info.tokenizer_sha256, info.model, info.architecture, info.vocab_size, info.weight_bytes, *precision


def _described(precision: tuple[str, str, str, bool]) -> str:
    weights, dtype, kv_cache, is_deterministic = precision
    return f"{weights} weights, {dtype}, KV in {kv_cache}" + (", deterministic" if is_deterministic else "")


class Engine(Protocol):
    """What a group reads of an engine's channel.

    identity       as of the last time that it was ready to serve; None: it never was
    identified_at  when that was
    """

    identity: Identity | None
    identified_at: float
    is_leaving: bool

    @property
    def label(self) -> str: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def away_s(self) -> float: ...


class EngineGroup:
    """The engines of a router that serve together. Others are refused as long as one of them may come back.

    At the start the engines that are ready within SETTLES_S vote; the largest group serves, and among equals the one
    whose engine is the first in the list.
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[Engine]],
        *,
        mixes: bool,
        settles_s: float = SETTLES_S,
    ) -> None:
        """
        engines  all members, in their order
        mixes    whether different precisions and sizes of blocks serve side by side
        """
        self._engines = engines
        self._mixes = mixes
        self._settles_s = settles_s
        self._identity: Identity | None = None  # of those that serve; None: none has been chosen
        self._chosen = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._has_warned = False

    async def admit(self, engine: Engine) -> None:
        """Wait until an engine that is about to be ready may serve. Raises WrongEngine if it may not."""
        assert engine.identity is not None, "it has greeted"
        if self._identity is not None and not self._fits(engine.identity) and not self._may_come_back():
            log.warning("no engine with the weights that served is left: those of the engine at %s do", engine.label)
            self._identity = None
            self._chosen.clear()
        while self._identity is None:
            self._vote()
            await self._chosen.wait()
        engine.identity.check_fits(self._identity, mixes=self._mixes)
        if not self._identity.is_known:
            self._identity = engine.identity
        if not engine.identity.is_known and len(self._engines()) > 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the engine at %s does not say which weights it has: whether its answers agree is not checked",
                engine.label,
            )

    def _fits(self, identity: Identity) -> bool:
        assert self._identity is not None, "one has been chosen"
        return identity.fits(self._identity, mixes=self._mixes)

    def _may_come_back(self) -> bool:
        """Whether an engine that has served with the group is a member and serves, or has not been away for long."""
        return any(
            engine.is_ready or engine.away_s < GONE_S
            for engine in self._engines()
            if not engine.is_leaving and engine.identity is not None and self._fits(engine.identity)
        )

    def _vote(self) -> None:
        """Choose as soon as more votes change nothing, or when time is up."""
        members = [engine for engine in self._engines() if not engine.is_leaving]
        votes = self._votes()
        if len(votes) == len(members) or 2 * max(map(self._count(votes), votes), default=0) > len(members):
            self._choose()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._settles_s, self._choose)

    def _choose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if votes := self._votes():
            known = [vote for vote in votes if vote.is_known]
            self._identity = max(known or votes, key=self._count(votes))  # the first of those with the most
            self._chosen.set()

    def _votes(self) -> list[Identity]:
        return [
            engine.identity
            for engine in self._engines()
            if engine.identity is not None
            and not engine.is_leaving
            and time.monotonic() - engine.identified_at < FRESH_S
        ]

    def _count(self, votes: Sequence[Identity]) -> Callable[[Identity], int]:
        return lambda identity: sum(identity.fits(vote, mixes=self._mixes) for vote in votes)
