"""Running sequences' blocks: cached ones, a sibling's, copies of begun ones, or new.

This combines the prefix cache, the prompts that siblings share, copies on write, and what preempted sequences keep.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..core.sequence import BlockTable, Request, Sequence, WindowTable
from ..core.step import Chunk, StepPlan
from .blocks import BlockPool
from .host_blocks import HostBlocks
from .prefix_cache import Prefix, PrefixCache
from .windows import HOLE, Windows


class BlockTables:
    """The one place that gives sequences blocks and takes them back. It alone replaces or changes `Sequence.blocks`.

    prompts   sequences that wait for a sibling's prompt
    prefixes  what other sequences can find
    """

    def __init__(self, pool: BlockPool, prefix_caching: bool, host: HostBlocks, windows: Windows) -> None:
        self._pool = pool
        self._host = host
        self._windows = windows
        self.prefixes = PrefixCache(pool, prefix_caching, windows)
        self.prompts = SharedPrompts(pool, windows)
        self._copies = BlockCopies(pool)

    def ended(self, seq: Sequence) -> list[Sequence]:
        """Note that a sequence has ended; return the sibling that must compute the prompt in its place, if any."""
        self._host.ended(seq)
        return self.prompts.ended(seq)

    def num_cached(self, seq: Sequence) -> int:
        """Count the leading tokens of a waiting sequence that need not be computed."""
        prefix = self.prompts.find(seq) or self.prefixes.match(seq)
        return max(prefix.num_tokens, min(self._host.num_kept(seq), seq.cacheable_len))

    def fetch(self, seq: Sequence) -> bool:
        """Say whether a new sequence should wait, because blocks of its prompt are being read from a file."""
        arrivals = self._host.arrivals
        return arrivals is not None and arrivals.fetch(seq, self.prefixes.match(seq))

    def start(self, seq: Sequence, length: int, num_running: int) -> Prefix | None:
        """Give a waiting sequence blocks for `length` tokens; return its prefix, or None if blocks are too few."""
        prefix = self._affordable_prefix(seq, length, num_running)
        if prefix is None and num_running == 0 and self.prompts.release():
            prefix = self._affordable_prefix(seq, length, num_running)
        if prefix is None:
            return None
        pool = self._pool
        pool.share(prefix.sources)
        num_shared = len(prefix.blocks)
        windows = tuple(WindowTable(each, each.first) for each in prefix.windows) or self._windows.new_tables()
        quota = self._windows.start(windows, pool.blocks_for(length))
        after = prefix.blocks[-1] if prefix.blocks else -1
        new = pool.allocate(pool.blocks_for(length) - num_shared, after)
        found_in_windows = [block for each in windows for block in each.held if block != HOLE]
        loaded_in_windows = self._windows.fill(windows) if prefix.window_loads else []
        num_published = num_shared if prefix.num_found is None else prefix.num_found
        hashes = seq.blocks.hashes if prefix.sibling is None else prefix.sibling.blocks.hashes[:num_shared]
        seq.blocks = BlockTable(prefix.table(new), hashes, num_published, windows, quota)
        self._host.started(seq, prefix)
        self._host.taken(new + loaded_in_windows)
        if prefix.partial is not None:
            self._copies.want(seq.id, prefix.partial, seq.blocks[num_shared])
        if prefix.sibling is None and seq.account.first_scheduled is None and not seq.output_len:
            pool.note_hit(prefix.sources)
            pool.note_hit(found_in_windows)
            if self._host.stored is not None:
                self._host.stored.found(seq, prefix.num_tokens // pool.block_size)
        self.prompts.started(seq)
        return prefix

    def grow(self, seq: Sequence) -> bool:
        """Give a running sequence one more block, if need be one that was held for siblings; False if there is none."""
        needed = 1 + self._windows.growth(seq.blocks) if self._windows else 1
        if self._pool.num_available < needed:
            self.prompts.release()
        if self._pool.num_available < needed:
            return False
        new = self._pool.allocate(1, after=seq.blocks[-1])
        seq.blocks += new
        if self._windows:
            self._windows.grown(seq.blocks)
        self._host.taken(new)
        return True

    def computed(self, seq: Sequence, num_computed: int) -> None:
        """Note that so many leading tokens of a running sequence are computed; let others find the full blocks."""
        table = seq.blocks
        table.num_committed = num_computed
        if self._host.num_blocks:
            self._host.computed(seq)
        if num_computed // self._pool.block_size > table.num_published:
            self.prefixes.publish(seq, num_computed)
        if table.windows:
            self._windows.passed(table, num_computed)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of so many tokens may hold."""
        num_columns = self._pool.blocks_for(num_tokens)
        return num_columns + self._windows.quota(self._windows.new_tables(), num_columns)

    def spare(self, num_running: int) -> int:
        """Count the available blocks, without one for each table of the running sequences, which they may need next."""
        return self._pool.num_available - num_running * (1 + len(self._windows))

    def leave(self, seq: Sequence) -> None:
        """Take a sequence's blocks back."""
        self._copies.drop(seq.id)
        self._pool.release(seq.blocks)
        self._windows.leave(seq.blocks)
        seq.blocks = BlockTable(hashes=seq.blocks.hashes)

    def plan(self, chunks: list[Chunk], most_loads: int) -> StepPlan:
        """Return a plan of these chunks and of the copies that they need.

        most_loads  see HostLoads
        """
        if not chunks:
            return StepPlan(chunks)
        if self._windows:
            self._host.taken(self._windows.cover(chunks))
        if not self._host.num_blocks:
            return StepPlan(chunks, self._copies.plan(chunks))
        return StepPlan(
            chunks, self._copies.plan(chunks), self._host.saves(), self._host.loads.take(chunks, most_loads)
        )

    def commit(self, plan: StepPlan) -> None:
        """Note that the oldest plan has been computed."""
        self._copies.commit(plan.copies)
        self._host.committed(plan)

    def _affordable_prefix(self, seq: Sequence, length: int, num_running: int) -> Prefix | None:
        # Each running sequence keeps a spare block, or the new one would be preempted as soon as the others grow. This
        # also keeps out a sequence that was just preempted: what it gave up, less the block it was given up for, is
        # too little.
        pool = self._pool
        spare = self.spare(num_running)
        if spare < 1:
            return None
        prefix = self._host.extend(seq, self.prompts.find(seq) or self.prefixes.match(seq))
        needed = (num_columns := pool.blocks_for(length)) - len(prefix.blocks)
        if self._windows:
            needed += self._windows.quota(prefix.windows or self._windows.new_tables(), num_columns)
        if needed + pool.num_unreferenced(prefix.sources) <= spare:
            return prefix
        if prefix.partial is None or needed + pool.num_unreferenced(prefix.blocks) > spare:
            return None
        return prefix.whole_blocks(pool.block_size)  # the block to copy is one more, while the copy is made

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every block is accounted for and no sequence writes to what another one reads."""
        seqs = list(running)
        tables = [seq.blocks for seq in seqs]
        windows = [each.held for table in tables for each in table.windows]
        self._pool.check_integrity([*tables, *windows, *self.prompts.held(), *self._copies.held()])
        held = {*itertools.chain(*windows), *(block for each in self.prompts.held_windows() for block in each.held)}
        pledged = sum(table.quota for table in tables) + sum(len(each.held) for each in self.prompts.held_windows())
        assert self._pool.num_pledged == pledged - len(held), "the pledges are not those of the windows"
        for seq in seqs:
            self._windows.check_integrity(seq.blocks, seq.num_computed)
        self._host.check_integrity()
        users = Counter(block for table in (*tables, *windows) for block in table)
        for seq in seqs:
            first = seq.num_computed // self._pool.block_size
            unwritten = [block for table in (seq.blocks, *seq.blocks.windows) for block in table[first:]]
            assert all(users[block] == 1 for block in unwritten), f"sequence {seq.id} writes to what others read"


class BlockCopies:
    """Blocks that start as copies of others, so that no sequence writes to a block that another one reads.

    Each copy is made in the step that first computes its sequence, before the step's chunks. Its source is held until
    that step is committed, because a step that fails is computed again.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._wanted: dict[int, tuple[int, int]] = {}  # sequence id → (source, target)
        self._planned: list[int] = []  # sources of plans that are not committed, in their order

    def want(self, id: int, source: int, target: int) -> None:
        """Let a sequence's new block `target` start as a copy of `source`. The caller hands over a reference to it."""
        self._wanted[id] = source, target

    def drop(self, id: int) -> None:
        """Drop the copy for a sequence that gives up its blocks, if it wanted one."""
        if pair := self._wanted.pop(id, None):
            self._pool.release(pair[:1])

    def plan(self, chunks: Iterable[Chunk]) -> list[tuple[int, int]]:
        """Return sources and targets of the copies that these chunks need."""
        if not self._wanted:
            return []
        pairs = [pair for chunk in chunks if (pair := self._wanted.pop(chunk.seq.id, None))]
        self._planned += (source for source, _ in pairs)
        return pairs

    def commit(self, pairs: list[tuple[int, int]]) -> None:
        """Note that the copies of the oldest plan that has any were made."""
        sources, self._planned = self._planned[: len(pairs)], self._planned[len(pairs) :]
        assert sources == [source for source, _ in pairs], (
            "copies are committed in the order in which they were planned"
        )
        for source in sources:
            self._pool.release([source])

    def held(self) -> Iterator[list[int]]:
        """Yield a list like a block table for each copy to be made."""
        yield from ([source] for source, _ in self._wanted.values())
        yield from ([source] for source in self._planned)


@dataclass(slots=True)
class _Siblings:
    """
    first   the sequence that computes the prompt
    others  those that have not started, by id
    blocks  of all of the prompt but its last token, once that is computed: held for `others`
    windows tables of the layers with sliding windows, likewise
    """

    first: Sequence
    others: dict[int, Sequence] = field(default_factory=dict)
    blocks: list[int] | None = None
    windows: tuple[WindowTable, ...] = ()


class SharedPrompts:
    """Requests of several sequences (parallel sampling): one sequence computes the prompt, the others start from it.

    A sequence that starts so computes the prompt's last token again, for logits of its own to sample from. The block
    that this token belongs to, and which the first sequence goes on to fill, is copied; all before it are shared. Where
    layers have windows of their own, nothing is copied: the sequence computes the tokens of that block again.
    """

    def __init__(self, pool: BlockPool, windows: Windows) -> None:
        self._pool = pool
        self._windows = windows
        self._siblings: dict[Request, _Siblings] = {}  # of requests with sequences that have not started

    @property
    def num_parked(self) -> int:
        return sum(len(siblings.others) for siblings in self._siblings.values() if siblings.blocks is None)

    def parked(self) -> Iterator[Sequence]:
        """Yield the sequences that wait for their prompt. Those that only wait for a place are not among them."""
        for siblings in self._siblings.values():
            if siblings.blocks is None:
                yield from siblings.others.values()

    def park(self, seq: Sequence) -> bool:
        """Say whether a new sequence must wait for the first one of its request; the others wait for the first."""
        if not seq.request.shares_prompt:
            return False
        siblings = self._siblings.setdefault(seq.request, _Siblings(seq))
        if siblings.first is not seq:
            siblings.others[seq.id] = seq
        return siblings.first is not seq

    def computed(self, seq: Sequence) -> list[Sequence]:
        """Note a sequence's first token; return the siblings that waited for it and may be admitted now.

        Its prompt's blocks are held for them; there are none if it was preempted before its token was known.
        """
        siblings = self._siblings.get(seq.request)
        if siblings is None or siblings.first is not seq:
            return []
        siblings.blocks = seq.blocks[: self._pool.blocks_for(seq.request.prompt_len - 1)]
        if self._windows and seq.blocks:
            self._hold_windows(siblings, seq.blocks, (seq.request.prompt_len - 1) // self._pool.block_size)
        self._pool.share(siblings.blocks)
        ready = list(siblings.others.values())
        self._forget_if_all_started(seq.request)
        return ready

    def _hold_windows(self, siblings: _Siblings, table: BlockTable, count: int) -> None:
        """Hold the first `count` blocks, with what the windows see behind them; nothing if that is not there."""
        firsts = self._windows.firsts(count * self._pool.block_size)
        held = tuple(
            WindowTable([*([0] * first), *each[first:count]], first)
            for each, first in zip(table.windows, firsts, strict=True)
        )
        is_there = all(each.first <= first for each, first in zip(table.windows, firsts, strict=True))
        num_held = sum(len(each.held) for each in held)
        if not is_there or num_held > self._pool.num_available:
            siblings.blocks = []
            return
        siblings.blocks, siblings.windows = table[:count], held
        self._pool.pledge(num_held)
        for each in held:
            self._pool.share_pledged(each.held)

    def find(self, seq: Sequence) -> Prefix | None:
        """Return what the first sequence computed of the prompt, for a sibling that has not started."""
        siblings = self._siblings.get(seq.request)
        if siblings is None or not siblings.blocks or seq.id not in siblings.others:
            return None
        shared_len = seq.request.prompt_len - 1
        full, rest = divmod(shared_len, self._pool.block_size)
        if self._windows:
            return Prefix(
                full * self._pool.block_size, siblings.blocks, sibling=siblings.first, windows=siblings.windows
            )
        return Prefix(shared_len, siblings.blocks[:full], siblings.blocks[full] if rest else None, siblings.first)

    def started(self, seq: Sequence) -> None:
        """Note that a sequence has blocks of its own: the prompt's are held for the others alone."""
        siblings = self._siblings.get(seq.request)
        if siblings is not None and seq.id in siblings.others:
            del siblings.others[seq.id]
            self._forget_if_all_started(seq.request)

    def ended(self, seq: Sequence) -> list[Sequence]:
        """Note that a sequence ended. If it was to compute the prompt, return the sibling that must do so now."""
        siblings = self._siblings.get(seq.request)
        if siblings is None:
            return []
        siblings.others.pop(seq.id, None)
        self._forget_if_all_started(seq.request)
        if siblings.first is not seq or siblings.blocks is not None or not siblings.others:
            return []
        siblings.first = siblings.others.pop(next(iter(siblings.others)))
        return [siblings.first]

    def release(self) -> bool:
        """Give up the blocks that are held, because they are wanted elsewhere; False if none are.

        A sequence that has not started then looks for its prompt in the prefix cache, like any other.
        """
        holding = [request for request, siblings in self._siblings.items() if siblings.blocks]
        for request in holding:
            self._siblings[request].others.clear()
            self._forget_if_all_started(request)
        return bool(holding)

    def held(self) -> Iterator[list[int]]:
        """Yield a list like a block table for each request."""
        yield from (siblings.blocks for siblings in self._siblings.values() if siblings.blocks)
        yield from (each.held for each in self.held_windows())

    def held_windows(self) -> Iterator[WindowTable]:
        for siblings in self._siblings.values():
            yield from siblings.windows

    def _forget_if_all_started(self, request: Request) -> None:
        siblings = self._siblings[request]
        if not siblings.others:
            del self._siblings[request]
            self._pool.release(siblings.blocks or [])
            for each in siblings.windows:
                self._pool.release_pledged(each.held)
                self._pool.pledge(-len(each.held))
