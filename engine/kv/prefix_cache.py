"""Which blocks a sequence can take over from others, and which of its own others may find. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.engine.kv.block_heads import LEAST_BLOCK_SIZE, BlockHeads
from pagoda_server.engine.kv.blocks import BlockPool, chain_hash


@dataclass(frozen=True, slots=True)
class Prefix:
    """Computed tokens that a sequence can start from.

    num_tokens  how many
    blocks      full ones, to be shared
    partial     the block that holds the rest, if any, to be copied
    sibling     the sequence of the same request that computed it; None: it was found by its content
    loads       positions in the block table, between and behind `blocks`, and the host blocks to be copied there
    num_found   where a preempted sequence goes on from what it kept: its leading blocks that others have; else None
    """

    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    partial: int | None = None
    sibling: Sequence | None = None
    loads: list[tuple[int, int]] = field(default_factory=list)
    num_found: int | None = None

    @property
    def sources(self) -> list[int]:
        """Blocks that are in use once a sequence has started from it."""
        return self.blocks if self.partial is None else [*self.blocks, self.partial]

    def table(self, new: list[int]) -> list[int]:
        """The block table of a sequence that starts from it, with these blocks for what is loaded and what follows."""
        if not self.loads:
            return self.blocks + new
        loaded = {at for at, _ in self.loads}
        shared, rest = iter(self.blocks), iter(new)
        count = len(self.blocks) + len(loaded)
        return [next(rest) if at in loaded else next(shared) for at in range(count)] + list(rest)

    def whole_blocks(self, block_size: int) -> Prefix:
        """Without the partial one."""
        return Prefix(len(self.blocks) * block_size, self.blocks, sibling=self.sibling)


class PrefixCache:
    """The addresses of sequences' full blocks in a pool. Nothing is found or published where not `enabled`."""

    def __init__(self, pool: BlockPool, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled
        self._heads = BlockHeads(pool) if pool.block_size >= LEAST_BLOCK_SIZE else None

    def match(self, seq: Sequence) -> Prefix:
        """What is cached of a sequence. Its last token is always computed: its logits are needed."""
        if not self._serves(seq):
            return Prefix()
        size, usable_len = self._pool.block_size, seq.num_tokens - 1
        self._extend_hashes(seq, usable_len // size)
        blocks = self._pool.match(seq.block_hashes[: usable_len // size])
        start = len(blocks) * size
        previous = seq.block_hashes[len(blocks) - 1] if blocks else seq.cache_root
        rest = seq.tokens[start : min(start + size, usable_len)]
        found = [self._find_begun(previous, rest)]
        if self._heads is not None:
            found.append(self._heads.find(previous, rest))
        partial, num_common = max(filter(None, found), key=lambda each: each[1], default=(None, 0))
        return Prefix(start + num_common, blocks, partial)

    def num_cached(self, seq: Sequence) -> int:
        """Leading tokens of a waiting sequence that need not be computed."""
        return self.match(seq).num_tokens

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Lets others find the blocks that are full now that this many leading tokens are computed."""
        if not self._serves(seq):
            return
        size = self._pool.block_size
        full = num_computed // size
        self._extend_hashes(seq, full)
        for index in range(seq.num_published, full):
            address = seq.block_hashes[index]
            if self._pool.publish(seq.blocks[index], address) and self._heads is not None:
                previous = seq.block_hashes[index - 1] if index else seq.cache_root
                self._heads.publish(previous, address, seq.tokens[index * size : (index + 1) * size])
        seq.num_published = full

    def publish_begun(self, seq: Sequence) -> None:
        """Let sequences that continue this one, which is about to end, find the block that it has begun."""
        size = self._pool.block_size
        full, rest = divmod(seq.num_committed, size)
        if not rest or not self._serves(seq):
            return
        self._extend_hashes(seq, full)
        previous = seq.block_hashes[full - 1] if full else seq.cache_root
        self._pool.publish(seq.blocks[full], chain_hash(previous, seq.tokens[full * size : seq.num_committed]))

    def _find_begun(self, previous: bytes, tokens: list[int]) -> tuple[int, int] | None:
        """A begun block behind `previous` that holds the first of these tokens and no others, and their number."""
        for count in range(min(len(tokens), self._pool.block_size - 1), 0, -1):
            if blocks := self._pool.match([chain_hash(previous, tokens[:count])]):
                return blocks[0], count
        return None

    def _extend_hashes(self, seq: Sequence, count: int) -> None:
        size = self._pool.block_size
        for index in range(len(seq.block_hashes), count):
            previous = seq.block_hashes[-1] if index else seq.cache_root
            seq.block_hashes.append(chain_hash(previous, seq.tokens[index * size : (index + 1) * size]))

    def _serves(self, seq: Sequence) -> bool:
        return self._enabled and not seq.bypass_cache
