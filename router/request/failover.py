"""What becomes of a request whose engine is lost: it goes on at another engine, or ends."""

from __future__ import annotations

import contextlib
from collections import Counter

from pagoda.v1 import control_pb2

from ..engines.channel import EngineChannel
from ..engines.fleet import Engines
from ..engines.waiting import Waiting
from ..errors import EngineLost, EnginesLost, Unavailable

MAX_LOSSES = 2  # of a request: one that ends its engines must not end them all
OUTCOMES = ("resubmitted", "continued", "unavailable", "refused")


class Failover:
    """Chooses where requests go whose engine was lost.

    continues  whether streams that have begun go on, too
    mixes      whether they go on in another precision if no engine with theirs is ready
    wait_s     how long a request waits for an engine that can take it, if none is ready; at least as long as new ones
    waiting    where it waits; None: in a place of its own
    outcomes   counts what became of the requests, for each time that one lost its engine
    """

    def __init__(self, *, continues: bool, wait_s: float, mixes: bool = False, waiting: Waiting | None = None) -> None:
        self.outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self._continues = continues
        self._mixes = mixes
        self._wait_s = wait_s
        self.waiting = waiting or Waiting()

    async def elsewhere(
        self,
        engines: Engines,
        engine: EngineChannel,
        lost: EngineLost,
        *,
        num_losses: int,
        has_begun: bool,
        timeout_s: float | None,
    ) -> EngineChannel:
        """Choose the engine that a request is submitted to again.

        engines     those of its model
        engine      the one that was lost
        num_losses  engines that the request has lost, this one included
        has_begun   the client has a part of the answer, which not every engine can continue
        timeout_s   seconds until the client's deadline; None: it has none

        Raises EngineLost if there is none, and EnginesLost if the request must not be submitted again.
        """
        if num_losses >= MAX_LOSSES:
            self.outcomes["refused"] += 1
            raise EnginesLost(num_losses) from lost
        if self._continues or not has_begun:
            like = lost.engine if has_begun else None
            with contextlib.suppress(Unavailable):
                chosen = await self._picked(engines, engine, like, timeout_s, mixes=self._mixes, has_begun=has_begun)
                self.outcomes["continued" if has_begun else "resubmitted"] += 1
                return chosen
        self.outcomes["unavailable"] += 1
        lost.retry_after_s = engines.retry_after_s
        raise lost

    async def decoder(self, engines: Engines, prefill: EngineChannel, timeout_s: float | None) -> EngineChannel:
        """Choose the engine that goes on with a request whose first tokens a prefill engine has computed.

        The other arguments are those of `elsewhere`. Raises Unavailable if there is none.
        """
        return await self._picked(engines, prefill, prefill.info, timeout_s, mixes=False, has_begun=True)

    async def _picked(
        self,
        engines: Engines,
        avoid: EngineChannel,
        like: control_pb2.EngineInfo | None,
        timeout_s: float | None,
        *,
        mixes: bool,
        has_begun: bool,
    ) -> EngineChannel:
        """Wait for an engine. Raises Unavailable."""

        def pick() -> EngineChannel:
            return engines.pick(avoid=(avoid,), like=like, mixes=mixes, has_begun=has_begun)

        return await self.waiting.found(pick, lambda: max(self._wait_s, self.waiting.wait_s), timeout_s)
