"""What the prefix cache holds, in the keys by which routers look for prefixes, and what has changed in it."""

from __future__ import annotations

from ...channel.strides import STRIDE, first_key, stride_keys
from ..core.sequence import Sequence
from .blocks import BlockPool


class CachedStrides:
    """The stride keys of cached blocks: a stride's last block stands for it, because chains lose their tails first.

    It knows blocks of sequences that have published some since it was made, whoever had computed them.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._keys_of: dict[bytes, list[int]] = {}  # by a block's address: of the strides that end in it
        self._holders: dict[int, int] = {}  # key → blocks that stand for it: several only where blocks end beyond it
        self._changes: dict[int, bool] = {}  # key → whether it is cached now
        pool.on_forget.append(self._forget)

    def published(self, seq: Sequence, num_full: int) -> None:
        """Note that a sequence's leading full blocks, which are hashed, can be found."""
        size, table = self._pool.block_size, seq.blocks
        known, count = len(table.strides), num_full * size // STRIDE
        if count <= known:
            return
        previous = table.strides[-1] if known else first_key(seq.request.cache_root)
        table.strides += stride_keys(previous, seq.tokens[known * STRIDE : count * STRIDE])
        for index in range(known, count):
            address = table.hashes[-(-(index + 1) * STRIDE // size) - 1]
            keys = self._keys_of.get(address)
            if keys is None:
                if not self._pool.match([address]):
                    continue
                keys = self._keys_of[address] = []
            if (key := table.strides[index]) not in keys:
                keys.append(key)
                self._holders[key] = self._holders.get(key, 0) + 1
                self._changes[key] = True

    def _forget(self, address: bytes) -> None:
        for key in self._keys_of.pop(address, ()):
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._changes[key] = False

    def take_changes(self) -> dict[int, bool]:
        """Return the keys that have changed since the last call, with whether they are cached now."""
        changes, self._changes = self._changes, {}
        return changes
