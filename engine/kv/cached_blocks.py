"""What the prefix cache holds, block by block with the tokens, and what has changed in it: for gateways outside."""

from __future__ import annotations

from ...channel.strides import chain_root
from ..core.sequence import Sequence
from ..core.step import CachedBlock
from .blocks import BlockPool


def block_key(address: bytes) -> int:
    """Return the hash by which a block is reported: the first eight bytes of its address."""
    return int.from_bytes(address[:8], "little")


class CachedBlocks:
    """The full blocks that can be found, of prompts without a salt: a salt is to keep prompts from others' eyes.

    It knows blocks of sequences that have published some since it was made, whoever had computed them.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._root = chain_root("")
        self._known: set[bytes] = set()
        self._changes: dict[int, CachedBlock | None] = {}
        pool.on_forget.append(self._forget)

    def published(self, seq: Sequence, num_full: int) -> None:
        """Note that a sequence's leading full blocks, which are hashed, can be found."""
        if seq.request.cache_root != self._root:
            return
        size, hashes, start = self._pool.block_size, seq.blocks.hashes, num_full
        while start and hashes[start - 1] not in self._known:
            start -= 1
        for index in range(start, num_full):
            address = hashes[index]
            if not self._pool.match([address]):  # so nothing behind it is found
                return
            parent = block_key(hashes[index - 1]) if index else None
            self._known.add(address)
            self._changes[block_key(address)] = CachedBlock(parent, seq.tokens[index * size : (index + 1) * size])

    def _forget(self, address: bytes) -> None:
        if address in self._known:
            self._known.remove(address)
            self._changes[block_key(address)] = None

    def take_changes(self) -> dict[int, CachedBlock | None]:
        """Return what has changed since the last call."""
        changes, self._changes = self._changes, {}
        return changes
