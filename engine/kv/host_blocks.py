"""What preempted sequences have computed, kept until they run again: in their old blocks, then in host memory.

Nothing is copied when a sequence gives up its blocks. Each block is noted. When it is handed out to be written, the
next plan first saves its content to host memory. The sequence later starts from what is still on the device and what is
loaded from the host, if loading is expected to be faster than computing (engine/timing/cost_model.py). Content that
finds no free host block is computed again.

Only the content of committed steps is kept. A save cannot be repeated, because a step that fails may have written over
the block: what a failed step saved is worth nothing, and a sequence that started from it starts again. A load can be
repeated, because host blocks are held until a step of their sequence is committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..core.sequence import Sequence, State
from ..core.step import StepPlan
from ..timing.cost_model import CostModel
from .arrivals import Arrivals, Peers
from .block_store import BlockStore
from .blocks import BlockPool
from .host_cache import HostCache
from .host_loads import HostLoads
from .lent_blocks import LentBlocks
from .prefix_cache import Prefix
from .stored_blocks import StoredBlocks
from .windows import Windows


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Host blocks in use now, and the tokens copied there and back since the engine started.

    blocks_used    by what preempted sequences keep
    blocks_cached  by prefixes that the device has evicted
    hit_tokens     of prompts, found in those
    stored_blocks  in the file (stored_blocks.py)
    read_tokens    of blocks that were read from it
    failed_blocks  that could not be written to it, or read because they were damaged or gone
    fetched_tokens    of blocks that came from other engines
    unfetched_blocks  that others were asked for and did not send
    lent_tokens       of blocks that went to others
    """

    blocks_total: int = 0
    blocks_used: int = 0
    saved_tokens: int = 0
    loaded_tokens: int = 0
    blocks_cached: int = 0
    hit_tokens: int = 0
    stored_blocks: int = 0
    read_tokens: int = 0
    failed_blocks: int = 0
    fetched_tokens: int = 0
    unfetched_blocks: int = 0
    lent_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Kept:
    """The first `num_tokens` of a sequence. Each of their blocks, by position, is on the device or on the host."""

    seq: Sequence
    num_tokens: int
    on_device: dict[int, int]
    on_host: dict[int, int]


_Users = list[tuple[_Kept, int]]  # the sequences that keep content in a block, and at which position of their tables


class HostBlocks:
    """
    num_blocks  of host memory; 0: nothing is kept
    pool        the blocks on the device
    costs       knows whether copying is faster than computing
    caches      whether evicted prefixes are kept, too
    store       of a third tier below those; None: there is none
    peers       other engines, from which blocks are fetched and to which they are lent; None: there are none
    clock       seconds, monotonic
    windows     of layers with blocks of their own; None: none have any
    """

    def __init__(
        self,
        num_blocks: int,
        pool: BlockPool,
        costs: CostModel,
        caches: bool = False,
        store: BlockStore | None = None,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
        windows: Windows | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._costs = costs
        self._block_size = pool.block_size
        self._saved_tokens = 0
        self._loaded_tokens = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: dict[int, _Kept] = {}  # by sequence; a running one is here until a step of it is committed
        self._noted: dict[int, _Users] = {}  # by block on the device
        self._held: dict[int, _Users] = {}  # by block on the host
        self._saves: dict[int, int] = {}  # host block → block, of the next plan
        self.loads = HostLoads()
        windows = windows or Windows(pool, (), 0)
        self._cache = HostCache(pool, self._free, costs, self.loads, windows) if caches and num_blocks else None
        self.stored: StoredBlocks | None = None
        self.lent: LentBlocks | None = None
        self.arrivals: Arrivals | None = None
        if self._cache is not None and store is not None:
            self.stored = StoredBlocks(store, self._cache, pool, costs, num_blocks)
        if self._cache is not None and peers is not None:
            self.lent = LentBlocks(peers.rows, self._cache, pool, costs)
        if self._cache is not None and (store is not None or peers is not None):
            self.arrivals = Arrivals(store, self.stored, peers, self._cache, pool, costs, num_blocks, clock)

    def load(self) -> HostLoad:
        cached, hits = (len(self._cache), self._cache.hit_tokens) if self._cache is not None else (0, 0)
        load = HostLoad(self.num_blocks, len(self._held), self._saved_tokens, self._loaded_tokens, cached, hits)
        if self.stored is not None:
            load = replace(load, stored_blocks=len(self.stored))
        if (arrivals := self.arrivals) is not None:
            load = replace(
                load,
                read_tokens=arrivals.file.tokens,
                failed_blocks=arrivals.file.num_failed,
                fetched_tokens=arrivals.peer.tokens,
                unfetched_blocks=arrivals.peer.num_failed,
            )
        return load if self.lent is None else replace(load, lent_tokens=self.lent.lent_tokens)

    # -- a sequence is preempted, starts, computes and ends -----------------------------------------------------------

    def keep(self, seq: Sequence) -> None:
        """Note the blocks that a preempted sequence is about to give up, if copying them is worth it."""
        if not self.num_blocks:
            return
        self.loads.drop(seq)
        if self._cache is not None:
            self._cache.released(seq)
        if not seq.blocks.num_committed:  # nothing is new since it started, and what it started from is still kept
            return
        if seq.blocks.windows:  # what lies behind the windows is gone, so only all of the rest would be of use
            return
        if not seq.cacheable_len:  # it will compute everything again, to read it
            return
        blocks = seq.blocks[: -(-seq.blocks.num_committed // self._block_size)]
        if not self._costs.is_worth_saving(len(blocks), seq.blocks.num_committed):
            return
        kept = self._kept[seq.id] = _Kept(seq, seq.blocks.num_committed, dict(enumerate(blocks)), {})
        for index, block in enumerate(blocks):
            self._noted.setdefault(block, []).append((kept, index))

    def taken(self, blocks: Iterable[int]) -> None:
        """Save noted blocks that were handed out: the next plan writes to them."""
        if self._noted:
            self._save_kept(blocks)
        if self._cache is not None:
            self._cache.taken(blocks)

    def _save_kept(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            users = self._noted.get(block)
            if users is None:
                continue
            if (host := self._take()) is None:
                for kept, position in list(users):
                    self._cut(kept, position)
                continue
            self._held[host] = self._noted.pop(block)
            self._saves[host] = block
            for kept, position in users:
                del kept.on_device[position]
                kept.on_host[position] = host

    def _take(self) -> int | None:
        """A host block; what preempted sequences keep goes before what is cached."""
        if self._free:
            return self._free.pop()
        return None if self._cache is None else self._cache.reclaim()

    def num_kept(self, seq: Sequence) -> int:
        """Return how many leading tokens of a waiting sequence are kept."""
        kept = self._kept.get(seq.id)
        return kept.num_tokens if kept else 0

    def extend(self, seq: Sequence, prefix: Prefix) -> Prefix:
        """Extend a waiting sequence's prefix by what is kept behind it, unless computing that is faster."""
        extended = self._extend_by_own(seq, prefix)
        return extended if self._cache is None or extended.is_own else self._cache.extend(seq, prefix)

    def _extend_by_own(self, seq: Sequence, prefix: Prefix) -> Prefix:
        kept = self._kept.get(seq.id)
        if kept is None:
            return prefix
        num_tokens = kept.num_tokens
        if num_tokens > seq.cacheable_len:  # whole blocks: others may have the one that it would write to
            num_tokens = seq.cacheable_len // self._block_size * self._block_size
        if num_tokens <= prefix.num_tokens:
            return prefix
        positions = range(len(prefix.blocks), -(-num_tokens // self._block_size))
        loads = [(position, kept.on_host[position]) for position in positions if position in kept.on_host]
        if loads and not self._costs.is_worth_loading(len(loads), prefix.num_tokens, num_tokens):
            return prefix
        own = [kept.on_device[position] for position in positions if position in kept.on_device]
        return replace(
            prefix,
            num_tokens=num_tokens,
            blocks=prefix.blocks + own,
            partial=None,
            loads=loads,
            num_found=len(prefix.blocks),
            is_own=True,
        )

    def started(self, seq: Sequence, prefix: Prefix) -> None:
        """Note that a sequence has its blocks, with this prefix; keep its content until a step of it is committed."""
        kept = self._kept.get(seq.id)
        if not prefix.is_own:
            if kept is not None:
                self._drop(kept)
            if self._cache is not None:
                self._cache.started(seq, prefix)
            return
        assert kept is not None, "it resumes from what it kept"
        assert prefix.num_found is not None, "what is its own comes after what was found"
        self._cut(kept, -(-prefix.num_tokens // self._block_size))
        kept.num_tokens = prefix.num_tokens
        for position in range(prefix.num_found):  # found by content, so others have them too
            self._forget(kept, position)
            kept.on_device[position] = seq.blocks[position]
            self._noted.setdefault(seq.blocks[position], []).append((kept, position))
        if prefix.loads:
            self.loads.want(seq, [(host, seq.blocks[position]) for position, host in prefix.loads])
        num_loaded = sum(self._num_tokens(kept, position) for position, _ in prefix.loads)
        seq.account.loads(num_loaded)
        self._loaded_tokens += num_loaded

    def computed(self, seq: Sequence) -> None:
        """Forget what a sequence kept: a step of it is committed, so its own blocks hold the content."""
        self.loads.drop(seq)
        if kept := self._kept.get(seq.id):
            self._drop(kept)
        if self._cache is not None:
            self._cache.released(seq)

    def flush(self) -> None:
        """Forget cached prefixes."""
        if self._cache is not None:
            self._cache.flush()
        if self.stored is not None:
            self.stored.flush()
        if self.arrivals is not None:
            self.arrivals.flush()
        if self.lent is not None:
            self.lent.flush()

    def ended(self, seq: Sequence) -> None:
        self.loads.drop(seq)
        if self.arrivals is not None:
            self.arrivals.ended(seq)
        if self._cache is not None:
            self._cache.released(seq)
        if kept := self._kept.get(seq.id):
            self._drop(kept)

    def committed(self, plan: StepPlan) -> None:
        """Hand on what a plan has saved, to the file and to other engines."""
        if self.stored is not None:
            self.stored.committed(plan)
        if self.lent is not None:
            self.lent.committed()

    def copy_idly(self) -> bool:
        """Copy what others wait for while nothing is to be computed and no step is in flight; False: nothing is."""
        has_lent = self.lent is not None and self.lent.lend_idly()
        return (self.stored is not None and self.stored.save_idly()) or has_lent

    # -- plans --------------------------------------------------------------------------------------------------------

    def saves(self) -> list[tuple[int, int]]:
        """Return (block, host block) pairs for the next plan, which must not be empty."""
        cached = self._cache.saves() if self._cache is not None else []
        if self.stored is not None:
            cached += self.stored.saves()
        if self.lent is not None:
            cached += self.lent.saves()
        if not self._saves:
            return cached
        for host in self._saves:
            users = self._held[host]
            for kept, position in users:
                kept.seq.account.saves(self._num_tokens(kept, position))
            self._saved_tokens += max(
                self._num_tokens(kept, position) for kept, position in users
            )  # shared ones are copied once
        pairs = [(block, host) for host, block in self._saves.items()]
        self._saves.clear()
        return pairs + cached

    def distrust(self, plan: StepPlan) -> list[Sequence]:
        """Forget what a failed step saved; return the running sequences that start again because of it."""
        misled = {seq.id: seq for seq in self.loads.misled()}
        for _, host in plan.saves:
            for kept, position in list(self._held.get(host, ())):
                self._cut(kept, position)
                if kept.seq.state is State.RUNNING:
                    misled[kept.seq.id] = kept.seq
        if self._cache is not None:
            misled.update((seq.id, seq) for seq in self._cache.distrust(plan))
        if self.stored is not None:
            self.stored.distrust(plan)
        if self.lent is not None:
            self.lent.distrust(plan)
        return list(misled.values())

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _num_tokens(self, kept: _Kept, position: int) -> int:
        return min(self._block_size, kept.num_tokens - position * self._block_size)

    def _cut(self, kept: _Kept, count: int) -> None:
        """Keep the first `count` blocks alone: content behind a gap is useless."""
        for position in [
            position for places in (kept.on_device, kept.on_host) for position in places if position >= count
        ]:
            self._forget(kept, position)
        kept.num_tokens = min(kept.num_tokens, count * self._block_size)

    def _drop(self, kept: _Kept) -> None:
        self._cut(kept, 0)
        del self._kept[kept.seq.id]

    def _forget(self, kept: _Kept, position: int) -> None:
        places, users_of = (kept.on_device, self._noted) if position in kept.on_device else (kept.on_host, self._held)
        block = places.pop(position)
        users_of[block].remove((kept, position))
        if not users_of[block]:
            del users_of[block]
            if users_of is self._held:
                self._saves.pop(block, None)
                self._free.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + used == total and every used host block is kept for a live sequence."""
        free = set(self._free)
        assert len(free) == len(self._free), "a host block is free twice"
        cached = self._cache.hosts() if self._cache is not None else set()
        for moving in (self.stored, self.arrivals, self.lent):
            moved = moving.hosts() if moving is not None else set()
            assert moved.isdisjoint(cached), "a host block is cached, and read, written or lent"
            cached |= moved
        assert free.isdisjoint(self._held.keys() | cached), "a host block that is in use is free"
        assert cached.isdisjoint(self._held), "a host block is in two places"
        assert len(free) + len(self._held) + len(cached) == self.num_blocks, (
            f"{len(free)} free + {len(self._held)} used + {len(cached)} cached != {self.num_blocks} host blocks"
        )
        for users_of, places_of in ((self._noted, _on_device), (self._held, _on_host)):
            listed = [(kept.seq.id, position, block) for block, users in users_of.items() for kept, position in users]
            kept_at = [(id, position, block) for id, kept in self._kept.items() for position, block in places_of(kept)]
            assert sorted(listed) == sorted(kept_at), "a block is kept for no sequence, or by none"
        for id, kept in self._kept.items():
            seq, count = kept.seq, -(-kept.num_tokens // self._block_size)
            assert id == seq.id, "what is kept is another sequence's"
            assert seq.state is not State.FINISHED, f"sequence {id} has ended and keeps blocks"
            assert sorted([*kept.on_device, *kept.on_host]) == list(range(count)), f"sequence {id} keeps parts"
            if seq.state is State.RUNNING:
                assert all(seq.blocks[position] == block for position, block in kept.on_device.items())
        assert self._saves.keys() <= self._held.keys(), "a save that no sequence needs"
        for seq in (*self.loads, *self.loads.misled()):
            assert seq.state is State.RUNNING, f"sequence {seq.id} does not run, and loads"


def _on_device(kept: _Kept) -> Iterator[tuple[int, int]]:
    yield from kept.on_device.items()


def _on_host(kept: _Kept) -> Iterator[tuple[int, int]]:
    yield from kept.on_host.items()
