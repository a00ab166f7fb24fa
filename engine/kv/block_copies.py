"""Blocks that start as copies of others, so that no sequence writes to a block that another one reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagoda_server.engine.core.sequence import Chunk
from pagoda_server.engine.kv.blocks import BlockPool


class BlockCopies:
    """Copies for sequences that start in the middle of a block. Each is made in the step that first computes its
    sequence, before the step's chunks; its source is held until that step is committed, since a step that fails is
    computed again.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._wanted: dict[int, tuple[int, int]] = {}  # sequence id → (source, target)
        self._planned: list[int] = []  # sources of plans that are not committed, in their order

    def want(self, id: int, source: int, target: int) -> None:
        """A sequence's new block `target` is to start as `source` is now, of which it has a reference to hand over."""
        self._wanted[id] = source, target

    def drop(self, id: int) -> None:
        """The sequence gave up its blocks; it may never have wanted a copy."""
        if pair := self._wanted.pop(id, None):
            self._pool.release(pair[:1])

    def plan(self, chunks: Iterable[Chunk]) -> list[tuple[int, int]]:
        """Sources and targets of the copies that these chunks need."""
        if not self._wanted:
            return []
        pairs = [pair for chunk in chunks if (pair := self._wanted.pop(chunk.seq.id, None))]
        self._planned += (source for source, _ in pairs)
        return pairs

    def commit(self, pairs: list[tuple[int, int]]) -> None:
        """The oldest plan with copies is committed: these have been made."""
        sources, self._planned = self._planned[: len(pairs)], self._planned[len(pairs) :]
        assert sources == [source for source, _ in pairs], (
            "copies are committed in the order in which they were planned"
        )
        for source in sources:
            self._pool.release([source])

    def held(self) -> Iterator[list[int]]:
        """Like a block table for each copy to be made."""
        yield from ([source] for source, _ in self._wanted.values())
        yield from ([source] for source in self._planned)
