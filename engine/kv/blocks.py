"""The block pool: which KV blocks are free, which hold a reusable prefix, which are in use and by how many sequences.

A block is in exactly one of three places: free (its content has no address), evictable (nobody uses it, but its content
is addressed by hash and may be wanted again) or referenced (in the block tables of sequences). Block tables and
reference counts are PagedAttention's (Kwon et al., 2023).
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from pagoda_server.engine.kv.eviction import EvictionOrder
from pagoda_server.engine.kv.free_blocks import FreeBlocks


def chain_root(salt: str) -> bytes:
    """Where the chain of a prompt with this salt starts. Prompts of different salts never share an address."""
    return hashlib.sha256(salt.encode()).digest()


def chain_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Address of a full block: its tokens and, through `previous`, all that came before, down to `chain_root`.

    SHA-256, not Python's hash: a prompt that collides with another tenant's would read its cache.
    """
    return hashlib.sha256(previous + array("q", tokens).tobytes()).digest()


class BlockPool:
    """Hands out blocks by number, shares them by content, and forgets content in an EvictionOrder."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = FreeBlocks(num_blocks, block_size)
        # Cached content is given up a stretch at a time, so that there is one to begin; up to so many blocks ahead.
        self._most_ahead = num_blocks // 32 if self._free.stretch > 1 else 0
        self._evictable = EvictionOrder(num_blocks)

    @property
    def num_free(self) -> int:
        return self._free.num_free

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        return self._free.num_free + len(self._evictable)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int, after: int = -1) -> list[int]:
        """Takes `count` blocks, evicting cached ones when no others are left. The caller has checked num_available.

        after  the block in whose neighbourhood they are wanted, -1: in none; side by side as far as that is free
        """
        if self._free.num_free < max(count, self._most_ahead):
            self._evict_for(count)
        taken = []
        for _ in range(count):
            after = self._free.take(after)
            self._references[after] = 1
            taken.append(after)
        return taken

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks that hold the longest cached run of these addresses. Nothing changes until `share`."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these count as available now and would not once shared."""
        return sum(self._references[block] == 0 for block in blocks)

    def num_shared(self, blocks: Sequence[int]) -> int:
        """How many of a block table's leading blocks others use too, who share them as a prefix."""
        return bisect_left(blocks, True, key=lambda block: self._references[block] == 1)

    def note_hit(self, blocks: Iterable[int]) -> None:
        """Another request found these: they are evicted after those that nobody has."""
        for block in blocks:
            self._evictable.note_hit(block)

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence uses each of these; a free one, who knows what it has left there."""
        for block in blocks:
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._free.remove(block)
                else:
                    self._evictable.remove(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One sequence fewer uses each of these, a block table in order."""
        # Backwards: a prefix is only reachable through its head, so its tail is to be evicted first.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._free.add((block,))
                else:
                    self._evictable.add(block)

    def publish(self, block: int, block_hash: bytes) -> bool:
        """A full block's content is computed: others may find it. False for a second block of the same content, which
        stays private.
        """
        if block_hash in self._block_of or self._hash_of[block] is not None:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def flush(self) -> int:
        """Forgets all cached content; blocks in use stay with their sequences. Returns how many became free."""
        flushed = len(self._evictable)
        self._free.add(self._evictable)
        self._evictable.clear()
        for block in self._block_of.values():
            self._hash_of[block] = None
        self._block_of.clear()
        return flushed

    def _evict_for(self, count: int) -> None:
        for _ in range(count - self._free.num_free):
            self._evict()
        if self._free.num_free < self._most_ahead and not self._free.num_whole:
            for _ in range(min(self._free.stretch, len(self._evictable))):
                self._evict()

    def _evict(self) -> None:
        block = self._evictable.pop()
        block_hash = self._hash_of[block]
        assert block_hash is not None, f"evictable block {block} has no address"
        del self._block_of[block_hash]
        self._hash_of[block] = None
        self._free.add((block,))

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless free + evictable + referenced == total and references are the tables' own."""
        used = Counter(block for table in block_tables for block in table)
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == self._free.num_free, "free blocks are miscounted"
        assert free.isdisjoint(evictable), "a block is in two places"
        assert (free | evictable).isdisjoint(used), "a block that is in use is free"
        assert len(free) + len(evictable) + len(used) == self.num_blocks, (
            f"{len(free)} free + {len(evictable)} evictable + {len(used)} referenced != {self.num_blocks} blocks"
        )
        for block, references in enumerate(self._references):
            assert references == used[block], f"block {block}: {references} references, in {used[block]} block tables"
        for block_hash, block in self._block_of.items():
            assert self._hash_of[block] == block_hash, f"block {block} is found under an address that is not its own"
            assert block not in free, f"free block {block} can be found"
        assert all(self._hash_of[block] is not None for block in evictable), "an evictable block cannot be found"
