"""Which blocks a sequence can take over from others, and which of its own others may find. Standard library only."""

from __future__ import annotations

from engine.blocks import BlockPool, chain_hash
from engine.sequence import Sequence


class PrefixCache:
    """The addresses of sequences' full blocks in a pool. Nothing is found or published where not `enabled`."""

    def __init__(self, pool: BlockPool, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled

    def match(self, seq: Sequence) -> list[int]:
        """Cached blocks that the sequence can start from. Its last token is always computed: its logits are needed."""
        if not self._serves(seq):
            return []
        usable = (seq.num_tokens - 1) // self._pool.block_size
        self._extend_hashes(seq, usable)
        return self._pool.match(seq.block_hashes[:usable])

    def num_cached(self, seq: Sequence) -> int:
        """Leading tokens of a waiting sequence that need not be computed."""
        return len(self.match(seq)) * self._pool.block_size

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Lets others find the blocks that are full now that this many leading tokens are computed."""
        if not self._serves(seq):
            return
        full = num_computed // self._pool.block_size
        self._extend_hashes(seq, full)
        for index in range(seq.num_published, full):
            self._pool.publish(seq.blocks[index], seq.block_hashes[index])
        seq.num_published = full

    def _extend_hashes(self, seq: Sequence, count: int) -> None:
        size = self._pool.block_size
        for index in range(len(seq.block_hashes), count):
            previous = seq.block_hashes[-1] if index else seq.cache_root
            seq.block_hashes.append(chain_hash(previous, seq.tokens[index * size : (index + 1) * size]))

    def _serves(self, seq: Sequence) -> bool:
        return self._enabled and not seq.bypass_cache
