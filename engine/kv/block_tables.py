"""Running sequences' blocks: found by their content, shared with siblings, copied where a block is begun, or new.

Puts together what each does of its own: the prefix cache, the prompts that sequences of one request share, copies on
write, and what preempted sequences keep. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pagoda_server.engine.core.sequence import Chunk, Sequence, StepPlan
from pagoda_server.engine.kv.block_copies import BlockCopies
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.kv.host_blocks import HostBlocks
from pagoda_server.engine.kv.prefix_cache import Prefix, PrefixCache
from pagoda_server.engine.kv.shared_prompts import SharedPrompts


class BlockTables:
    def __init__(self, pool: BlockPool, prefix_caching: bool, host: HostBlocks) -> None:
        self._pool = pool
        self._host = host
        self._prefixes = PrefixCache(pool, prefix_caching)
        self._prompts = SharedPrompts(pool)
        self._copies = BlockCopies(pool)

    # -- siblings that wait for a prompt ------------------------------------------------------------------------------

    @property
    def num_parked(self) -> int:
        return self._prompts.num_parked

    def parked(self) -> Iterator[Sequence]:
        """Those that wait for a sibling's prompt."""
        yield from self._prompts.parked()

    def park(self, seq: Sequence) -> bool:
        """Whether a new sequence is to wait for a sibling's prompt."""
        return self._prompts.park(seq)

    def prompt_computed(self, seq: Sequence) -> list[Sequence]:
        """It has its first token. Returns the siblings that waited for that."""
        return self._prompts.computed(seq)

    def ended(self, seq: Sequence) -> list[Sequence]:
        """Returns the sibling that is to compute the prompt now, if it was this one that should have."""
        self._host.ended(seq)
        return self._prompts.ended(seq)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def num_cached(self, seq: Sequence) -> int:
        """Leading tokens of a waiting sequence that need not be computed."""
        return max(self._prefixes.num_cached(seq), self._host.num_kept(seq))

    def start(self, seq: Sequence, length: int, num_running: int) -> Prefix | None:
        """Gives a waiting sequence blocks for `length` tokens and returns its prefix; None if they are too few."""
        prefix = self._affordable_prefix(seq, length, num_running)
        if prefix is None and num_running == 0 and self._prompts.release():
            prefix = self._affordable_prefix(seq, length, num_running)
        if prefix is None:
            return None
        pool = self._pool
        pool.share(prefix.sources)
        num_shared = len(prefix.blocks)
        after = prefix.blocks[-1] if prefix.blocks else -1
        new = pool.allocate(pool.blocks_for(length) - num_shared, after)
        seq.blocks = prefix.table(new)
        self._host.started(seq, prefix)
        self._host.taken(new)
        if prefix.partial is not None:
            self._copies.want(seq.id, prefix.partial, seq.blocks[num_shared])
        if prefix.sibling is None and seq.first_scheduled is None and not seq.output_len:
            pool.note_hit(prefix.sources)
        seq.num_published = num_shared if prefix.num_found is None else prefix.num_found
        seq.num_computed, seq.num_committed = prefix.num_tokens, 0
        self._prompts.started(seq)
        return prefix

    def grow(self, seq: Sequence) -> bool:
        """One block more for a sequence that runs; False if there is none. Prompts are not held at its cost."""
        if not self._pool.num_available:
            self._prompts.release()
        if not self._pool.num_available:
            return False
        new = self._pool.allocate(1, after=seq.blocks[-1])
        seq.blocks += new
        self._host.taken(new)
        return True

    def computed(self, seq: Sequence, num_computed: int) -> None:
        """So many leading tokens of a running sequence are computed: others may find the blocks that are full now."""
        seq.num_committed = num_computed
        self._host.computed(seq)
        if num_computed // self._pool.block_size > seq.num_published:
            self._prefixes.publish(seq, num_computed)

    def publish_begun(self, seq: Sequence) -> None:
        """Let others go on from all that a running sequence has computed, which is about to end."""
        self._prefixes.publish_begun(seq)

    def keep(self, seq: Sequence) -> None:
        """A sequence is about to leave, and will come back for what it has computed."""
        self._host.keep(seq)

    def leave(self, seq: Sequence) -> None:
        """A sequence gives up its blocks."""
        self._copies.drop(seq.id)
        self._pool.release(seq.blocks)
        seq.blocks = []

    def plan(self, chunks: list[Chunk]) -> StepPlan:
        """These chunks, and the copies that they need."""
        if not chunks:
            return StepPlan(chunks)
        if not self._host.num_blocks:
            return StepPlan(chunks, self._copies.plan(chunks))
        return StepPlan(chunks, self._copies.plan(chunks), self._host.saves(), self._host.loads(chunks))

    def commit(self, plan: StepPlan) -> None:
        """Note that the oldest plan has been computed."""
        self._copies.commit(plan.copies)

    def _affordable_prefix(self, seq: Sequence, length: int, num_running: int) -> Prefix | None:
        # One block each is left for those who run: else a newcomer would be preempted as soon as they grow. It also
        # keeps out who has just been preempted: what it gave up, less the block it was given up for, is too little.
        pool = self._pool
        spare = pool.num_available - num_running
        if spare < 1:
            return None
        prefix = self._host.extend(seq, self._prompts.find(seq) or self._prefixes.match(seq))
        needed = pool.blocks_for(length) - len(prefix.blocks)
        if needed + pool.num_unreferenced(prefix.sources) <= spare:
            return prefix
        if prefix.partial is None or needed + pool.num_unreferenced(prefix.blocks) > spare:
            return None
        return prefix.whole_blocks(pool.block_size)  # the block to copy is one more, while the copy is made

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every block is accounted for, and nobody writes to what others read."""
        seqs = list(running)
        tables = [seq.blocks for seq in seqs]
        self._pool.check_integrity([*tables, *self._prompts.held(), *self._copies.held()])
        self._host.check_integrity()
        users = Counter(block for table in tables for block in table)
        for seq in seqs:
            unwritten = seq.blocks[seq.num_computed // self._pool.block_size :]
            assert all(users[block] == 1 for block in unwritten), f"sequence {seq.id} writes to what others read"
