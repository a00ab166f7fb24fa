"""Cached blocks by their first tokens: a prompt that goes its own way inside a block still finds it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine.blocks import BlockPool, chain_hash


@dataclass(frozen=True, slots=True)
class _Content:
    address: bytes
    tokens: array[int]


class BlockHeads:
    """For each head, a block's first quarter behind a given prefix, the last published block that begins with it.

    Less is not worth a copy. One entry a head keeps a lookup from searching all that follows a popular prefix. Heads
    are addressed like blocks: nothing is found behind another prefix, or under another salt.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._head_len = max(1, pool.block_size // 4)
        self._contents: dict[bytes, _Content] = {}  # those of blocks that are no longer cached linger a while

    def publish(self, previous: bytes, address: bytes, tokens: Sequence[int]) -> None:
        """A full block of these tokens is cached at `address`, behind the block or root `previous`."""
        if len(self._contents) > 2 * self._pool.num_blocks + 64:
            self._contents = {head: of for head, of in self._contents.items() if self._pool.match([of.address])}
        head = chain_hash(previous, tokens[: self._head_len])
        self._contents[head] = _Content(address, array("q", tokens))

    def find(self, previous: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """A cached block behind `previous` that begins like these tokens, and how many of them it begins with."""
        if len(tokens) < self._head_len:
            return None
        content = self._contents.get(chain_hash(previous, tokens[: self._head_len]))
        cached = self._pool.match([content.address]) if content is not None else []
        if content is None or not cached:
            return None
        return cached[0], _num_common(content.tokens, tokens)


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
