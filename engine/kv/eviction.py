"""In which order cached blocks are given up: segmented LRU (Karedla, Love & Wherry, 1994)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

_MAX_HOT = 0.8  # of all blocks: what was once hot and is no longer wanted must not keep everything else out


class EvictionOrder:
    """Cached blocks that no sequence uses. Content that was never found again goes first, the least recently used of it
    before the rest: prompts that come once, however long, do not displace one that many share.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_hot = int(num_blocks * _MAX_HOT)
        self._cold: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hot: OrderedDict[int, None] = OrderedDict()
        self._found_again: set[int] = set()  # of all blocks with content, those in use included

    def __len__(self) -> int:
        return len(self._cold) + len(self._hot)

    def __iter__(self) -> Iterator[int]:
        yield from self._cold
        yield from self._hot

    def note_hit(self, block: int) -> None:
        """Another request wanted its content. Takes effect when the block is added the next time."""
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
        """A sequence uses it again."""
        if block in self._cold:
            del self._cold[block]
        else:
            del self._hot[block]

    def pop(self) -> int:
        """The block to give up, whose content is worth least."""
        block, _ = (self._cold or self._hot).popitem(last=False)
        self._found_again.discard(block)
        return block

    def clear(self) -> None:
        self._cold.clear()
        self._hot.clear()
        self._found_again.clear()
