"""The prefix cache: which cached blocks a sequence can start from, and which of its own blocks others may find."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from ..core.sequence import Sequence, WindowTable
from ..core.step import CachedBlock
from .blocks import BlockPool, chain_hash, chain_hashes
from .cached_blocks import CachedBlocks
from .cached_strides import CachedStrides
from .windows import Windows, window_address

LEAST_BLOCK_SIZE = 8  # what a prompt shares of a smaller block takes less time to compute than to find and copy
_MOST_OF_A_HEAD = 4


@dataclass(frozen=True, slots=True)
class Prefix:
    """Computed tokens that a sequence can start from.

    num_tokens  how many
    blocks      full ones, to be shared
    windows     tables of the layers with sliding windows: the blocks that the next queries see, and holes for those
                that are loaded
    partial     the block that holds the rest, if any, to be copied
    sibling     the sequence of the same request that computed it; None: it was found by its content
    loads       positions in the block table, between and behind `blocks`, and the host blocks to be copied there
    window_loads  groups of layers, positions in their window tables, and the host blocks to be copied there
    num_found   where blocks are loaded, or a sequence resumes from what it kept: the leading blocks before those, which
                other sequences have; else None
    is_own      the sequence resumes from what it kept
    """

    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    partial: int | None = None
    sibling: Sequence | None = None
    loads: list[tuple[int, int]] = field(default_factory=list)
    num_found: int | None = None
    is_own: bool = False
    windows: tuple[WindowTable, ...] = ()
    window_loads: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def sources(self) -> list[int]:
        """Blocks that are in use once a sequence has started from it."""
        return self.blocks if self.partial is None else [*self.blocks, self.partial]

    def table(self, new: list[int]) -> list[int]:
        """Return the blocks of a sequence that starts from it; `new` hold what is loaded and what follows."""
        if not self.loads:
            return self.blocks + new
        loaded = {position for position, _ in self.loads}
        shared, rest = iter(self.blocks), iter(new)
        count = len(self.blocks) + len(loaded)
        return [next(rest) if position in loaded else next(shared) for position in range(count)] + list(rest)

    def whole_blocks(self, block_size: int) -> Prefix:
        """Return it without the partial block."""
        return Prefix(len(self.blocks) * block_size, self.blocks, sibling=self.sibling)


class PrefixCache:
    """The addresses of sequences' full blocks in a pool. Nothing is found or published where not `enabled`."""

    def __init__(self, pool: BlockPool, enabled: bool, windows: Windows) -> None:
        self._pool = pool
        self._enabled = enabled
        self._windows = windows
        self._strides: CachedStrides | None = None
        self._blocks: CachedBlocks | None = None
        self._heads = BlockHeads(pool) if pool.block_size >= LEAST_BLOCK_SIZE and not windows else None

    def match(self, seq: Sequence) -> Prefix:
        """Find what is cached of a sequence, as far as it may start from that."""
        if not self._serves(seq):
            return Prefix()
        size, usable_len, hashes = self._pool.block_size, seq.cacheable_len, seq.blocks.hashes
        self._extend_hashes(seq, usable_len // size)
        blocks = self._pool.match(hashes[: usable_len // size])
        if self._windows:
            return self._match_windows(hashes, blocks)
        start = len(blocks) * size
        previous = hashes[len(blocks) - 1] if blocks else seq.request.cache_root
        rest = seq.tokens[start : min(start + size, usable_len)]
        found = [self._find_begun(previous, rest)]
        if self._heads is not None:
            found.append(self._heads.find(previous, rest))
        partial, num_common = max(filter(None, found), key=lambda each: each[1], default=(None, 0))
        return Prefix(start + num_common, blocks, partial)

    def _match_windows(self, hashes: list[bytes], blocks: list[int]) -> Prefix:
        """Return the longest part of a cached prefix before which the blocks inside each window are cached, too."""
        count = self._windows.usable(hashes, len(blocks), lambda address: bool(self._pool.match([address])))
        tables = []
        for group, first in enumerate(self._windows.firsts(count * self._pool.block_size)):
            found = self._pool.match(window_address(each, group) for each in hashes[first:count])
            tables.append(WindowTable([0] * first + found, first))
        return Prefix(count * self._pool.block_size, blocks[:count], windows=tuple(tables))

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Let other sequences find the blocks that are full now that this many leading tokens are computed."""
        if not self._serves(seq):
            return
        size, table = self._pool.block_size, seq.blocks
        full = num_computed // size
        self._extend_hashes(seq, full)
        for index in range(table.num_published, full):
            address = table.hashes[index]
            if self._pool.publish(table[index], address) and self._heads is not None:
                previous = table.hashes[index - 1] if index else seq.request.cache_root
                self._heads.publish(previous, address, seq.tokens[index * size : (index + 1) * size])
            for group, window in enumerate(table.windows):
                if index >= window.first:
                    self._pool.publish(window[index], window_address(address, group))
        table.num_published = full
        if self._strides is not None:
            self._strides.published(seq, full)
        if self._blocks is not None:
            self._blocks.published(seq, full)

    def watch(self, *, blocks: bool = False) -> None:
        """Note from now on what is cached and what is no longer, by stride or block by block."""
        if self._enabled and blocks and self._blocks is None:
            self._blocks = CachedBlocks(self._pool)
        elif self._enabled and not blocks and self._strides is None:
            self._strides = CachedStrides(self._pool)

    def take_changes(self) -> tuple[dict[int, bool], dict[int, CachedBlock | None]]:
        """Return what has changed since the last call, see StepOutput: stride keys, and blocks."""
        strides = self._strides.take_changes() if self._strides is not None else {}
        return strides, self._blocks.take_changes() if self._blocks is not None else {}

    def publish_begun(self, seq: Sequence) -> None:
        """Let sequences that continue this one, which is about to end, find the block that it has begun."""
        size, table = self._pool.block_size, seq.blocks
        full, rest = divmod(table.num_committed, size)
        if not rest or self._windows or not self._serves(seq):
            return
        self._extend_hashes(seq, full)
        previous = table.hashes[full - 1] if full else seq.request.cache_root
        self._pool.publish(table[full], chain_hash(previous, seq.tokens[full * size : table.num_committed]))

    def _find_begun(self, previous: bytes, tokens: list[int]) -> tuple[int, int] | None:
        """Find a begun block behind `previous` that holds the first of these tokens and no others, and their number."""
        for count in range(min(len(tokens), self._pool.block_size - 1), 0, -1):
            if blocks := self._pool.match([chain_hash(previous, tokens[:count])]):
                return blocks[0], count
        return None

    def _extend_hashes(self, seq: Sequence, count: int) -> None:
        size, hashes = self._pool.block_size, seq.blocks.hashes
        if len(hashes) < count:
            previous = hashes[-1] if hashes else seq.request.cache_root
            hashes += chain_hashes(previous, seq.tokens[len(hashes) * size : count * size], size)

    def _serves(self, seq: Sequence) -> bool:
        return self._enabled and not seq.request.bypass_cache


@dataclass(frozen=True, slots=True)
class _Content:
    address: bytes
    tokens: array[int]


class BlockHeads:
    """Cached blocks by their first tokens: a prompt that leaves another prompt's path inside a block still finds it.

    A head is the first quarter of a block behind a given prefix; fewer tokens are not worth a copy. Only the blocks
    published last are kept for each head, so that a lookup need not search everything that follows a popular prefix.
    Heads are addressed like blocks: nothing is found behind another prefix, or under another salt.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._head_len = max(1, pool.block_size // 4)
        self._contents: dict[bytes, list[_Content]] = {}  # by head; blocks that are no longer cached linger a while

    def publish(self, previous: bytes, address: bytes, tokens: Tokens[int]) -> None:
        """Note a full block of these tokens, cached at `address`, behind the block or root `previous`."""
        if len(self._contents) > 2 * self._pool.num_blocks:
            kept = {head: [of for of in contents if self._is_cached(of)] for head, contents in self._contents.items()}
            self._contents = {head: contents for head, contents in kept.items() if contents}
        contents = self._contents.setdefault(chain_hash(previous, tokens[: self._head_len]), [])
        contents.append(_Content(address, array("q", tokens)))
        del contents[:-_MOST_OF_A_HEAD]

    def find(self, previous: bytes, tokens: Tokens[int]) -> tuple[int, int] | None:
        """Find the cached block behind `previous` that begins most like these tokens; return it and how many agree."""
        if len(tokens) < self._head_len:
            return None
        contents = self._contents.get(chain_hash(previous, tokens[: self._head_len]), ())
        cached = [content for content in contents if self._is_cached(content)]
        if not cached:
            return None
        best = max(cached, key=lambda content: _num_common(content.tokens, tokens))
        return self._pool.match([best.address])[0], _num_common(best.tokens, tokens)

    def _is_cached(self, content: _Content) -> bool:
        return bool(self._pool.match([content.address]))


def _num_common(first: Tokens[int], second: Tokens[int]) -> int:
    """Return the length of the longest common prefix."""
    return next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
