"""Free KV blocks, handed out so that a sequence's blocks lie side by side in memory. Standard library only.

Small blocks waste few slots, but scattered over memory they cost attention time: a processor fetches ahead what lies
side by side. So blocks are grouped in stretches of neighbours. Who grows gets the block after its last one if that is
free; who begins gets the first of a stretch that is wholly free, as long as there is one. Nothing is reserved by this:
when no stretch is wholly free, the rest of those that others have begun is handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

STRETCH_TOKENS = 32  # longer ones made decodes' attention hardly faster


class FreeBlocks:
    """Every operation takes constant time for each block. At first all are free, and the first are handed out first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.stretch = max(1, STRETCH_TOKENS // block_size)  # blocks in one
        self._is_free = bytearray(num_blocks + 1)  # nothing is free behind the last
        self.num_free = 0
        self._num_free_of = [0] * -(-num_blocks // self.stretch)  # for each stretch
        self._whole: dict[int, None] = {}  # stretches by what is free of them; the last to change is the first taken
        self._begun: dict[int, None] = {}
        self.add(range(num_blocks - 1, -1, -1))

    def __iter__(self) -> Iterator[int]:
        return (block for block, is_free in enumerate(self._is_free) if is_free)

    @property
    def num_whole(self) -> int:
        """Stretches that are wholly free."""
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
        """The block behind `after`, which may be -1, if that is free; else the best to go on from. One must be free."""
        block = after + 1
        if after < 0 or not self._is_free[block]:
            stretch = next(reversed(self._whole or self._begun))
            block = self._is_free.index(True, stretch * self.stretch)
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """A free block is used."""
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
