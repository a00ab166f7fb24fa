"""Cached blocks by their first tokens: a prompt that goes its own way inside a block still finds it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pagoda_server.engine.kv.blocks import BlockPool, chain_hash

LEAST_BLOCK_SIZE = 8  # what a prompt shares of a smaller block takes less time to compute than to find and copy
_MOST_OF_A_HEAD = 4


@dataclass(frozen=True, slots=True)
class _Content:
    address: bytes
    tokens: array[int]


class BlockHeads:
    """For each head, a block's first quarter behind a given prefix, the blocks published last that begin with it.

    Fewer tokens are not worth a copy. Few blocks a head keep a lookup from searching all that follows a popular prefix.
    Heads are addressed like blocks: nothing is found behind another prefix, or under another salt.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._head_len = max(1, pool.block_size // 4)
        self._contents: dict[bytes, list[_Content]] = {}  # those of blocks that are no longer cached linger a while

    def publish(self, previous: bytes, address: bytes, tokens: Sequence[int]) -> None:
        """A full block of these tokens is cached at `address`, behind the block or root `previous`."""
        if len(self._contents) > 2 * self._pool.num_blocks:
            kept = {head: [of for of in contents if self._is_cached(of)] for head, contents in self._contents.items()}
            self._contents = {head: contents for head, contents in kept.items() if contents}
        contents = self._contents.setdefault(chain_hash(previous, tokens[: self._head_len]), [])
        contents.append(_Content(address, array("q", tokens)))
        del contents[:-_MOST_OF_A_HEAD]

    def find(self, previous: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The cached block behind `previous` that has most tokens in common with the start of these, and how many."""
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


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
