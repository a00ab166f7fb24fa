"""The prefix cache's third tier: blocks in a file, which outlive the engine and are shared by the engines of a host.

A block goes to the file once a second request has found it, so that prompts that come once are neither written nor
displace others. The next plans save such blocks to host blocks, half a millisecond of copies a step, and an engine
with nothing to compute saves them at once. The store's thread (block_store.py) writes them from there.
A sequence that comes later waits until they have been read (arrivals.py).
"""

from __future__ import annotations

import logging
from itertools import islice

from ..core.sequence import Sequence
from ..core.step import StepPlan
from ..timing.cost_model import CostModel
from .block_file import StoredBlock
from .block_store import BlockStore
from .blocks import BlockPool
from .host_cache import HostCache

log = logging.getLogger("pagoda.engine")

_COPY_BUDGET_S = 0.0005  # of a step, for copies of blocks that are to be written
_FIRST_COPIES, _MOST_COPIES = 8, 64  # blocks a step: before copies have been timed, and at most
_WRITING_PART = 8  # at most this part of host memory holds blocks that are to be written


class StoredBlocks:
    """Decides which blocks go to the file, and has them written.

    num_hosts  blocks of host memory
    """

    def __init__(self, store: BlockStore, cache: HostCache, pool: BlockPool, costs: CostModel, num_hosts: int) -> None:
        self._store, self._cache, self._pool, self._costs = store, cache, pool, costs
        self._most_written = max(1, num_hosts // _WRITING_PART)
        self._wanted: dict[bytes, StoredBlock] = {}  # blocks that should be written
        self._saving: dict[int, StoredBlock | None] = {}  # by host block, in plans; None: no longer wanted
        self._writing: set[int] = set()  # host blocks

    def __len__(self) -> int:
        return len(self._store)

    def found(self, seq: Sequence, num_blocks: int) -> None:
        """Note that a new request has found its leading blocks in the cache."""
        addresses = seq.blocks.hashes[:num_blocks]
        stored = []
        for position, address in enumerate(addresses):
            if self._store.holds(address):
                stored.append(address)
            elif len(self._wanted) < self._pool.num_blocks:  # where the disk is slow, some wait for their next request
                parent = addresses[position - 1] if position else seq.request.cache_root
                self._wanted[address] = StoredBlock(address, parent, position)
        if stored:
            self._store.touch(stored)

    def saves(self) -> list[tuple[int, int]]:
        """Return (block, host block) pairs for the next plan, which must not be empty."""
        pairs: list[tuple[int, int]] = []
        if not self._wanted:
            return pairs
        copy_s = self._costs.block_copy_s
        most = _FIRST_COPIES if not copy_s else max(1, min(int(_COPY_BUDGET_S / copy_s), _MOST_COPIES))
        most = min(most, self._most_written - len(self._saving) - len(self._writing))
        for address in list(islice(self._wanted, 4 * most)):
            if len(pairs) == most:
                break
            block = self._wanted.pop(address)
            if self._store.holds(address):
                continue
            if not (found := self._pool.match([address])):
                if self._cache.holds(address):
                    self._wanted[address] = block  # it is being loaded
                continue
            if (host := self._cache.take()) is None:
                self._wanted[address] = block
                break
            self._saving[host] = block
            pairs.append((found[0], host))
        return pairs

    def save_idly(self) -> bool:
        """Save blocks while nothing is to be computed and no step is in flight; return whether there were any."""
        pairs = self.saves()
        if not pairs:
            return False
        plan = StepPlan([], saves=pairs)
        try:
            self._store.rows.copy(plan)
        except Exception:
            log.exception("%d blocks could not be copied to host memory", len(pairs))
            self.distrust(plan)
        self.committed(plan)
        return True

    def committed(self, plan: StepPlan) -> None:
        """Write what a plan has saved."""
        saved = [(block, host) for _, host in plan.saves if (block := self._pop_saving(host)) is not None]
        if saved:
            self._writing.update(host for _, host in saved)
            self._store.write(saved)

    def distrust(self, plan: StepPlan) -> None:
        """Do not write what a failed step saved."""
        for _, host in plan.saves:
            if self._pop_saving(host) is not None:
                self._cache.give_back(host)

    def _pop_saving(self, host: int) -> StoredBlock | None:
        if host not in self._saving:
            return None
        block = self._saving.pop(host)
        if block is None:
            self._cache.give_back(host)
        return block

    def has_written(self, host: int) -> None:
        """Give back a host block whose content has been written, or could not be."""
        self._writing.remove(host)
        self._cache.give_back(host)

    def flush(self) -> None:
        """Forget all blocks, in the file too."""
        self._wanted.clear()
        self._saving = dict.fromkeys(self._saving)
        self._store.clear()

    def hosts(self) -> set[int]:
        """Host blocks in use here. Raises AssertionError unless they are accounted for."""
        assert self._writing.isdisjoint(self._saving), "a host block is used twice"
        return {*self._saving, *self._writing}
