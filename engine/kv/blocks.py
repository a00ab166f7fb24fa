"""The block pool: which KV blocks are free, which hold a reusable prefix, which are in use and by how many sequences.

A block is in exactly one of three places: free (its content has no address), evictable (no sequence uses it, but its
content is addressed by hash and may be wanted again) or referenced (in the block tables of sequences). Block tables and
reference counts are PagedAttention's (Kwon et al., 2023).

Free blocks are handed out so that a sequence's blocks lie side by side in memory. Small blocks waste few slots, but
scattered over memory they cost attention time, because a processor fetches ahead what lies side by side. Blocks are
therefore grouped in stretches of neighbours. A sequence that grows gets the block after its last one if that is free;
a new one gets the first block of a wholly free stretch, as long as there is one. Stretches reserve nothing: when none
is wholly free, the free blocks of begun stretches are handed out.

Cached blocks are evicted by segmented LRU (Karedla, Love & Wherry, 1994).
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

STRETCH_TOKENS = 32  # longer ones made decodes' attention hardly faster
_MAX_HOT = 0.8  # of all blocks: what was once hot and is no longer wanted must not keep everything else out


def chain_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Return a block's address: it stands for its tokens and, through `previous`, for all tokens since the root.

    SHA-256, not Python's hash, because a prompt that collided with another tenant's would read its cache.
    """
    return hashlib.sha256(previous + array("q", tokens).tobytes()).digest()


def chain_hashes(previous: bytes, tokens: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Yield the addresses of the full blocks of these tokens, which follow the block or root `previous`."""
    content = array("q", tokens)
    size = block_size * content.itemsize
    content_bytes = memoryview(content).cast("B")
    for start in range(0, len(content_bytes) - size + 1, size):
        previous = hashlib.sha256(previous + content_bytes[start : start + size]).digest()
        yield previous


class BlockPool:
    """Hands out blocks by number, shares them by content, and forgets content in an EvictionOrder."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = FreeBlocks(num_blocks, block_size)
        # Whole stretches of cached content are evicted ahead of need, up to so many blocks, for sequences that start.
        self._most_ahead = num_blocks // 32 if self._free.stretch > 1 else 0
        self._evictable = EvictionOrder(num_blocks)
        self._evicted: dict[int, bytes] | None = None  # see remember_evicted
        self.on_forget: list[Callable[[bytes], None]] = []  # called with an address that finds nothing any more
        self.num_pledged = 0  # blocks that are not referenced, but may only be drawn: see windows.py

    def remember_evicted(self) -> dict[int, bytes]:
        """Note the content of evicted blocks from now on, by block: who gets one of them removes its entry."""
        self._evicted = {}
        return self._evicted

    @property
    def num_free(self) -> int:
        return self._free.num_free

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that may be taken: free or evictable, and pledged to no sequence."""
        return self._free.num_free + len(self._evictable) - self.num_pledged

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self._num_unreferenced

    @property
    def _num_unreferenced(self) -> int:
        return self._free.num_free + len(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int, after: int = -1) -> list[int]:
        """Take `count` blocks; evict cached ones when no others are left. The caller has checked num_available.

        after  the block that they should follow in memory; -1: none
        """
        if self._free.num_free < max(count, self._most_ahead):
            self._evict_for(count)
        taken = []
        for _ in range(count):
            after = self._free.take(after)
            self._references[after] = 1
            taken.append(after)
        return taken

    def pledge(self, count: int) -> None:
        """Keep so many more blocks for sequences that run; fewer, if it is negative. The caller has checked."""
        self.num_pledged += count

    def draw(self, count: int, after: int) -> list[int]:
        """`allocate` blocks that are pledged."""
        self.num_pledged -= count
        return self.allocate(count, after)

    def share_pledged(self, blocks: Iterable[int]) -> None:
        """`share`, on a pledge, what is available."""
        before = self._num_unreferenced
        self.share(blocks)
        self.num_pledged -= before - self._num_unreferenced

    def release_pledged(self, blocks: Sequence[int]) -> None:
        """`release` blocks that are pledged again."""
        before = self._num_unreferenced
        self.release(blocks)
        self.num_pledged += self._num_unreferenced - before

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached run of these addresses. Nothing changes until `share`."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """Count the blocks that are available now and would not be once shared."""
        return sum(self._references[block] == 0 for block in blocks)

    def num_shared(self, blocks: Sequence[int]) -> int:
        """Count the leading blocks of a table that other sequences share as a prefix."""
        return bisect_left(blocks, True, key=lambda block: self._references[block] == 1)

    def note_hit(self, blocks: Iterable[int]) -> None:
        """Note that another request found these. They are evicted after blocks that no request has found."""
        for block in blocks:
            self._evictable.note_hit(block)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. A free block is shared only by the sequence that left its content there."""
        for block in blocks:
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._free.remove(block)
                    if self._evicted is not None:
                        self._evicted.pop(block, None)
                else:
                    self._evictable.remove(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block of a table, given in order."""
        # Backwards: a prefix can only be reached through its head, so its tail must be evicted first.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._free.add((block,))
                else:
                    self._evictable.add(block)

    def publish(self, block: int, block_hash: bytes) -> bool:
        """Let sequences find a block, now that it is computed. Return False if another block has the same content."""
        if block_hash in self._block_of or self._hash_of[block] is not None:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def flush(self) -> int:
        """Forget all cached content; blocks in use stay with their sequences. Return how many became free."""
        flushed = len(self._evictable)
        self._free.add(self._evictable)
        self._evictable.clear()
        for block in self._block_of.values():
            self._hash_of[block] = None
        for forget in self.on_forget:
            for block_hash in self._block_of:
                forget(block_hash)
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
        if self._evicted is not None:
            self._evicted[block] = block_hash
        for forget in self.on_forget:
            forget(block_hash)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless free + evictable + referenced == total and references are the tables' own."""
        used = Counter(block for table in block_tables for block in table)
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == self._free.num_free, "free blocks are miscounted"
        assert free.isdisjoint(evictable), "a block is in two places"
        assert (free | evictable).isdisjoint(used), "a block that is in use is free"
        assert len(free) + len(evictable) + len(used) == self.num_blocks, (
            f"{len(free)} free + {len(evictable)} evictable + {len(used)} referenced != {self.num_blocks} blocks"
        )
        assert 0 <= self.num_pledged <= self._num_unreferenced, f"{self.num_pledged} blocks are pledged"
        for block, references in enumerate(self._references):
            assert references == used[block], f"block {block}: {references} references, in {used[block]} block tables"
        for block_hash, block in self._block_of.items():
            assert self._hash_of[block] == block_hash, f"block {block} is found under an address that is not its own"
            assert block not in free, f"free block {block} can be found"
        assert all(self._hash_of[block] is not None for block in evictable), "an evictable block cannot be found"


class FreeBlocks:
    """Free blocks by stretch; every operation takes constant time for each block. Low numbers are handed out first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.stretch = max(1, STRETCH_TOKENS // block_size)  # blocks in a stretch
        self._is_free = bytearray(num_blocks + 1)  # the entry behind the last block is never free
        self.num_free = 0
        self._num_free_of = [0] * -(-num_blocks // self.stretch)  # by stretch
        self._whole: dict[int, None] = {}  # wholly free stretches; the last to change is the first taken
        self._begun: dict[int, None] = {}  # partly free ones, likewise
        self.add(range(num_blocks - 1, -1, -1))

    def __iter__(self) -> Iterator[int]:
        return (block for block, is_free in enumerate(self._is_free) if is_free)

    @property
    def num_whole(self) -> int:
        """Count the stretches that are wholly free."""
        return len(self._whole)

    def add(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._is_free[block] = True
            self.num_free += 1
            stretch = block // self.stretch
            self._num_free_of[stretch] = num_free = self._num_free_of[stretch] + 1
            if num_free < self.stretch:
                self._begun[stretch] = None
            else:
                self._begun.pop(stretch, None)
                self._whole[stretch] = None

    def take(self, after: int) -> int:
        """Take the block behind `after`, which may be -1, if it is free, else the best other one. One must be free."""
        block = after + 1
        if after < 0 or not self._is_free[block]:
            stretch = next(reversed(self._whole or self._begun))
            block = self._is_free.index(True, stretch * self.stretch)
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """Take a given free block."""
        self._is_free[block] = False
        self.num_free -= 1
        stretch = block // self.stretch
        self._num_free_of[stretch] = num_left = self._num_free_of[stretch] - 1
        if num_left == self.stretch - 1:
            del self._whole[stretch]
            if num_left:
                self._begun[stretch] = None
        elif not num_left:
            del self._begun[stretch]


class EvictionOrder:
    """Cached blocks that no sequence uses, in the order in which they are evicted.

    Content that was never found again is evicted first, least recently used first. Thus prompts that come once, however
    long, do not displace a prompt that many requests share.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_hot = int(num_blocks * _MAX_HOT)
        self._cold: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hot: OrderedDict[int, None] = OrderedDict()
        self._found_again: set[int] = set()  # blocks with content, in use or not

    def __len__(self) -> int:
        return len(self._cold) + len(self._hot)

    def __iter__(self) -> Iterator[int]:
        yield from self._cold
        yield from self._hot

    def note_hit(self, block: int) -> None:
        """Note that another request wanted a block's content, with effect when the block is added the next time."""
        self._found_again.add(block)

    def add(self, block: int) -> None:
        if block not in self._found_again:
            self._cold[block] = None
            return
        self._hot[block] = None
        if len(self._hot) > self._max_hot:
            oldest, _ = self._hot.popitem(last=False)
            self._found_again.discard(oldest)
            self._cold[oldest] = None

    def remove(self, block: int) -> None:
        """Remove a block that a sequence uses again."""
        if block in self._cold:
            del self._cold[block]
        else:
            del self._hot[block]

    def pop(self) -> int:
        """Remove and return the block whose content is worth least."""
        block, _ = (self._cold or self._hot).popitem(last=False)
        self._found_again.discard(block)
        return block

    def clear(self) -> None:
        self._cold.clear()
        self._hot.clear()
        self._found_again.clear()
