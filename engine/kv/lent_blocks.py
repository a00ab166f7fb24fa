"""Cached blocks that other engines ask for, copied out of the prefix cache on the loop's thread.

A block on the device is saved to a host block with the next plan, half a millisecond of copies a step or a twentieth of
a longer one, but 8 MB at least; an engine with nothing to compute saves at once. What host memory has cached is held
until that plan is committed, because an earlier plan may still be writing it. Then the content is copied, and both are
given back: nothing stays held while a network takes its time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ..core.step import StepPlan
from ..timing.cost_model import CostModel
from .block_store import HostRows
from .blocks import BlockPool
from .host_cache import HostCache

log = logging.getLogger("pagoda.engine")

_COPY_BUDGET_S, _COPY_PART = 0.0005, 0.05  # of a step, and the part of a long one, for copies that others ask for
# A step copies so much at least, whatever it takes: copying has a cost that does not depend on the number of blocks, so
# that few of them look slow, and would stay few.
_LEAST_BYTES = 8 << 20
_MOST_COPIES = 256  # blocks a step


@dataclass(slots=True, eq=False)
class _Loan:
    """
    addresses  of consecutive blocks of a prompt
    reply      takes the content of the first of them, up to one that is not cached
    contents   so far; None: there is none
    pending    blocks whose plan is not committed
    """

    addresses: Sequence[bytes]
    reply: Callable[[list[bytes]], None]
    contents: list[bytes | None] = field(default_factory=list)
    pending: int = 0
    is_over: bool = False  # no more blocks will be looked for


@dataclass(slots=True, eq=False)
class _Planned:
    """A block of a loan that a plan's commit makes readable.

    is_own      its host block was taken for this alone
    is_spoilt   its content is not to be lent: a step that wrote it failed, or the cache was flushed
    """

    loan: _Loan
    position: int
    host: int
    is_own: bool
    is_spoilt: bool = False


class LentBlocks:
    """
    rows   host memory
    cache  of it
    """

    def __init__(self, rows: HostRows, cache: HostCache, pool: BlockPool, costs: CostModel) -> None:
        self.lent_tokens = 0
        self._rows, self._cache, self._pool, self._costs = rows, cache, pool, costs
        self._asked: deque[_Loan] = deque()
        self._planned: deque[list[_Planned]] = deque()  # of each plan that is not committed, in order

    def lend(self, addresses: Sequence[bytes], reply: Callable[[list[bytes]], None]) -> None:
        """Copy out the blocks at these addresses, up to the first one that is not cached.

        `reply` is called on this thread once that is done, with their contents.
        """
        self._asked.append(_Loan(addresses, reply))

    def saves(self) -> list[tuple[int, int]]:
        """Return (block, host block) pairs for the next plan, which must be committed."""
        planned = list[_Planned]()
        self._planned.append(planned)
        pairs: list[tuple[int, int]] = []
        if not self._asked:
            return pairs
        copy_s = self._costs.block_copy_s
        budget_s = max(_COPY_BUDGET_S, _COPY_PART * self._costs.last_step_s)
        least = max(1, _LEAST_BYTES // self._rows.host_row(0).nbytes)
        most = min(max(least, int(budget_s / copy_s) if copy_s else 0), _MOST_COPIES)
        while self._asked and len(planned) < most:
            loan = self._asked[0]
            found = self._find(loan, pairs)
            if found is not None:
                planned.append(found)
            if found is None or len(loan.contents) == len(loan.addresses):
                self._asked.popleft()
                loan.is_over = True
                self._reply_if_done(loan)
        return pairs

    def _find(self, loan: _Loan, pairs: list[tuple[int, int]]) -> _Planned | None:
        """Make the next block of a loan readable; None: it is not cached, or there is no host block for it."""
        address = loan.addresses[len(loan.contents)]
        is_own = bool(blocks := self._pool.match([address]))
        host = self._cache.take() if is_own else self._cache.pin(address)
        if host is None:
            return None
        if is_own:
            pairs.append((blocks[0], host))
        found = _Planned(loan, len(loan.contents), host, is_own)
        loan.contents.append(None)
        loan.pending += 1
        return found

    def lend_idly(self) -> bool:
        """Copy blocks while nothing is to be computed and no step is in flight; return whether any were asked for."""
        if not self._asked:
            return False
        plan = StepPlan([], saves=self.saves())
        try:
            if plan.saves:
                self._rows.copy(plan)
        except Exception:
            log.exception("%d blocks could not be copied to host memory", len(plan.saves))
            self.distrust(plan)
        self.committed()
        return True

    def committed(self) -> None:
        """Copy what the oldest plan has made readable."""
        for each in self._planned.popleft():
            loan = each.loan
            if not each.is_spoilt:
                loan.contents[each.position] = bytes(self._rows.host_row(each.host))
                self.lent_tokens += self._pool.block_size
            loan.pending -= 1
            if each.is_own:
                self._cache.give_back(each.host)
            else:
                self._cache.unpin(each.host)
            self._reply_if_done(loan)

    def distrust(self, plan: StepPlan) -> None:
        """Do not lend what a failed step saved."""
        saved = {host for _, host in plan.saves}
        for each in chain(*self._planned):
            each.is_spoilt |= each.host in saved

    def _reply_if_done(self, loan: _Loan) -> None:
        if loan.is_over and not loan.pending:
            contents = loan.contents
            end = contents.index(None) if None in contents else len(contents)
            loan.reply([content for content in contents[:end] if content is not None])

    def flush(self) -> None:
        """Lend nothing of what was cached before."""
        while self._asked:
            loan = self._asked.popleft()
            loan.is_over = True
            self._reply_if_done(loan)
        for each in chain(*self._planned):
            each.is_spoilt = True

    def hosts(self) -> set[int]:
        """Host blocks in use here alone."""
        return {each.host for each in chain(*self._planned) if each.is_own}
