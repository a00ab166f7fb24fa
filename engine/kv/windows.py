"""Blocks of layers with a sliding window: taken when a step needs them, and given back once the window has passed.

Each group of such layers has a table of its own (engine/core/layer_groups.py). A sequence's window tables hold only
what its next queries see and what the scheduled steps write. So that a running sequence never lacks a block for its
next step, the pool pledges what its windows may hold at once, and the pledge counts as taken when others start. A block
that two sequences share counts in both pledges: either of them may go on alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from ..core.sequence import BlockTable, WindowTable
from ..core.step import Chunk
from .blocks import BlockPool

HOLE = -1  # the entry of a window table whose block is still to be taken
STEPS_AHEAD = 2  # the step in flight and the next one may each compute a whole token budget of one sequence


def most_held(window: int, token_budget: int, block_size: int) -> int:
    """Return how many blocks a window table may hold at once.

    A block before the window and one behind the last token may be partly used, and one more is kept before the window:
    a sequence that is preempted resumes at the start of a block.
    """
    return -(-(window + STEPS_AHEAD * token_budget) // block_size) + 3


def longest_held(num_blocks: int, windows: Sequence[int | None], token_budget: int, block_size: int) -> int:
    """Return how many tokens of one sequence a pool of so many blocks holds.

    windows  of each group of layers; None: its tables hold all tokens
    """
    spans = [num_blocks if each is None else most_held(each, token_budget, block_size) for each in windows]
    columns = range(num_blocks + 1)
    return block_size * (bisect_right(columns, num_blocks, key=lambda n: sum(min(n, span) for span in spans)) - 1)


def window_address(block_hash: bytes, group: int) -> bytes:
    """Return the address of a block of a group of layers with a window, given that of the other block."""
    return block_hash + group.to_bytes(2, "little")


class Windows:
    """
    windows       of each group of layers that has one, in tokens
    token_budget  of a step
    """

    def __init__(self, pool: BlockPool, windows: Sequence[int], token_budget: int) -> None:
        self._pool, self._size = pool, pool.block_size
        self._windows = windows
        self._spans = [most_held(window, token_budget, pool.block_size) for window in windows]

    def __len__(self) -> int:
        return len(self._windows)

    def firsts(self, num_tokens: int) -> list[int]:
        """Return each table's first block that a query sees behind so many tokens."""
        return [max(0, num_tokens - window + 1) // self._size for window in self._windows]

    def usable(self, hashes: Sequence[bytes], count: int, is_cached: Callable[[bytes], bool]) -> int:
        """Return of how many of these leading blocks each window's blocks are cached, too: at most `count`."""
        group = 0
        while group < len(self):
            first = self.firsts(count * self._size)[group]
            behind = range(count - 1, first - 1, -1)
            missing = next((at for at in behind if not is_cached(window_address(hashes[at], group))), None)
            # Every prefix that ends behind a block that is missing, up to here, lacks it.
            group, count = (group + 1, count) if missing is None else (0, missing)
        return count

    def new_tables(self) -> tuple[WindowTable, ...]:
        return tuple(WindowTable() for _ in self._windows)

    def quota(self, tables: Iterable[WindowTable], num_columns: int) -> int:
        """Return how many blocks the window tables of a sequence may hold, if its other table has so many."""
        return sum(min(num_columns - each.first, span) for each, span in zip(tables, self._spans, strict=True))

    def start(self, tables: tuple[WindowTable, ...], num_columns: int) -> int:
        """Share these window tables' blocks for a sequence; return its quota, for which there is room."""
        quota = self.quota(tables, num_columns)
        self._pool.pledge(quota)
        for each in tables:
            self._pool.share_pledged(block for block in each.held if block != HOLE)
        return quota

    def fill(self, tables: Iterable[WindowTable]) -> list[int]:
        """Take the blocks that are still to be taken for these tables, which have started. Return them."""
        taken: list[int] = []
        for each in tables:
            for at, block in enumerate(each):
                if block == HOLE:
                    each[at : at + 1] = new = self._pool.draw(1, after=each[at - 1] if at else -1)
                    taken += new
        return taken

    def growth(self, table: BlockTable) -> int:
        """Return how much the quota grows with a block more of the other table."""
        return self.quota(table.windows, len(table) + 1) - table.quota

    def grown(self, table: BlockTable) -> None:
        """Note that a table has a block more. There was room for `growth`."""
        self._pledge(table)

    def cover(self, chunks: Iterable[Chunk]) -> list[int]:
        """Let the window tables of these chunks' sequences reach as far as the chunks do. Return the new blocks."""
        taken: list[int] = []
        for chunk in chunks:
            num_columns = self._pool.blocks_for(chunk.end)
            for each in chunk.seq.blocks.windows:
                if len(each) < num_columns:
                    new = self._pool.draw(num_columns - len(each), after=each[-1] if each else -1)
                    each += new
                    taken += new
        return taken

    def passed(self, table: BlockTable, num_computed: int) -> None:
        """Give back what lies behind the windows, now that so many leading tokens will not be computed again."""
        has_passed = False
        for each, window in zip(table.windows, self._windows, strict=True):
            first = (num_computed - window) // self._size - 1
            if first > each.first:
                self._pool.release_pledged(each[each.first : first])
                each.first, has_passed = first, True
        if has_passed:
            self._pledge(table)

    def leave(self, table: BlockTable) -> None:
        """Give back the blocks of all window tables of a sequence."""
        for each in table.windows:
            self._pool.release_pledged(each.held)
        self._pool.pledge(-table.quota)

    def _pledge(self, table: BlockTable) -> None:
        quota = self.quota(table.windows, len(table))
        self._pool.pledge(quota - table.quota)
        table.quota = quota

    def check_integrity(self, table: BlockTable, num_computed: int) -> None:
        """Raise AssertionError if a table lacks what is needed, or holds what lies behind its window.

        num_computed  tokens, those of scheduled steps included
        """
        assert len(table.windows) == len(self._windows), "a sequence lacks window tables"
        for each, window, first in zip(table.windows, self._windows, self.firsts(num_computed), strict=True):
            assert each.first <= first, "a block inside the window was given back"
            assert self._pool.blocks_for(num_computed) <= len(each) <= len(table), "a window table has another length"
            if table.num_committed:
                behind = (table.num_committed - window) // self._size - 1
                assert each.first >= behind, "a block behind the window is still held"
        held = sum(len(each.held) for each in table.windows)
        assert held <= table.quota == self.quota(table.windows, len(table)), f"{held} blocks, {table.quota} pledged"
