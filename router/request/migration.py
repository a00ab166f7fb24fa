"""Streams that leave an engine which is going to end, together with what it has cached of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from pagoda.engine.v1 import engine_pb2

from ...settings.request import MAX_PRIORITY
from ..engines.channel import EngineChannel
from ..engines.choosing import Asked
from ..engines.fleet import Engines
from ..errors import PagodaError
from .resuming import Progress, continuing

OUTCOMES = ("moved", "stayed")
MOST_AT_ONCE = 2  # streams for which blocks are fetched: more would make each of them wait longer
MOST_ROUNDS = 4  # of copies
FEW = 8  # tokens that a sequence may be ahead of what its next engine has computed of it, when it goes there
MOST_S = 60.0  # until an engine has the blocks of a sequence; then the stream stays where it is
_IS_COMPUTED = (engine_pb2.END_REASON_STOP, engine_pb2.END_REASON_LENGTH)


class Migrations:
    """What the migrations of a router share.

    is_on     whether streams may go on at another engine
    outcomes  counts what became of the streams for which another engine was to fetch blocks
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self.places = asyncio.Semaphore(MOST_AT_ONCE)


class Migration:
    """A stream's way from one engine to another, on which it hardly pauses (live migration; Clark et al., 2005).

    Once its engine is going to end, another one gets the sequences as they are then, for one token more that nobody
    reads. It fetches their blocks, or what it can of them, while the stream runs on. That is done again, and is faster
    each time, until the stream is only FEW tokens ahead. After that `target` is set. What the stream has become
    meanwhile is submitted there, and finds its blocks in the prefix cache.

    source    where the stream is
    submit    the request as its first engine got it
    progress  returns how far the sequences are
    timeout_s returns how many seconds are left until the client's deadline; None: it has none
    """

    def __init__(
        self,
        migrations: Migrations,
        engines: Engines,
        source: EngineChannel,
        submit: engine_pb2.Submit,
        progress: Callable[[], Progress],
        timeout_s: Callable[[], float | None],
    ) -> None:
        self.target: EngineChannel | None = None
        self._num_copied = 0  # tokens of output that it has computed, as far as is known
        self._migrations = migrations
        self._engines = engines
        self._source = source
        self._submit = submit
        self._progress = progress
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    def is_due(self) -> bool:
        """Say whether the stream is to go to `target` now. To be asked after each token: it begins once it has to."""
        if self.target is not None:
            return self.target.takes_requests
        source = self._source
        if self._task is None and source.is_draining and source.block_layout and self._migrations.is_on:
            self._task = asyncio.create_task(self._prepare())
        return False

    @property
    def lender(self) -> tuple[str, int] | None:
        """Where `target` can fetch what it lacks; None: that is so little that it is computed sooner."""
        if self._num_tokens - self._num_copied <= FEW * self._submit.sampling.n:
            return None
        longest = max(len(ids) for ids in self._progress() if ids is not None)
        return self._source.address, len(self._submit.prompt) + longest

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _prepare(self) -> None:
        """Find another engine, and have it fetch the blocks."""
        async with self._migrations.places:
            try:
                self.target = await self._prepared()
            except PagodaError:  # no engine is ready, or the target has just been lost
                self.target = None
            self._migrations.outcomes["stayed" if self.target is None else "moved"] += 1

    async def _prepared(self) -> EngineChannel | None:
        """Return an engine that has computed all sequences; None: the picked one cannot. Raises Unavailable."""
        target = self._engines.pick(avoid=(self._source,), like=self._source.info, has_begun=True)
        if target.block_layout != self._source.block_layout:
            return None
        is_copied = has_failed = False
        for number in range(MOST_ROUNDS):
            before = self._num_tokens
            is_copied = await self._copied(target)
            if not is_copied and (number == 0 or has_failed):
                return None
            has_failed |= not is_copied  # a later round may fail once: most of the stream is there already
            self._num_copied = before if is_copied else self._num_copied
            if is_copied and self._num_tokens - before <= FEW * self._submit.sampling.n:
                break
        return target if is_copied else None

    async def _copied(self, target: EngineChannel) -> bool:
        """Have the target compute all sequences as far as they exist; return whether it has done so."""
        for index in range(len(self._progress())):
            if not await self._rehearse(index, target):
                return False
        return True

    @property
    def _num_tokens(self) -> int:
        return sum(len(ids) for ids in self._progress() if ids is not None)

    async def _rehearse(self, index: int, target: EngineChannel) -> bool:
        """Have the target compute one sequence as far as it exists; return whether it has done so."""
        ids = self._progress()[index]
        if ids is None:
            return True
        rehearsal = continuing(self._submit, index, ids)
        rehearsal.max_tokens, rehearsal.min_tokens = len(ids) + 1, 0
        rehearsal.ClearField("logprobs")
        rehearsal.priority = max(-MAX_PRIORITY, rehearsal.priority - 1)  # streams that have moved go first
        if (timeout_s := self._timeout_s()) is not None:
            rehearsal.timeout_s = timeout_s
        num_tokens = len(rehearsal.prompt) + len(ids)
        asked = Asked((), None, num_cached=num_tokens, lender=(self._source.address, num_tokens))
        stream = target.submit(rehearsal, asked=asked)
        try:
            async with asyncio.timeout(MOST_S):
                while (ended := stream.inboxes[0].ended) is None:
                    await stream.wait()
            return ended.reason in _IS_COMPUTED
        except TimeoutError:
            return False
        finally:
            stream.close()
