"""Copies from host memory that sequences need before they compute, shared out over steps.

A sequence that starts with many blocks in host memory would lengthen one step for all others. Beside decodes a step
therefore makes only so many copies (engine/scheduling/pacing.py), those of the highest rank first, and a sequence has
no chunk before the step with its last copies. Its host blocks are held until a step of it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..core.sequence import Sequence
from ..core.step import Chunk

_Pairs = list[tuple[int, int]]  # host block, block


class HostLoads:
    def __init__(self) -> None:
        self._wanted: dict[int, tuple[Sequence, _Pairs]] = {}  # by sequence whose first chunk is not planned
        self._begun: dict[int, Sequence] = {}  # whose first copies are in an earlier plan than its first chunk

    def __bool__(self) -> bool:
        """Whether copies are left that no plan has."""
        return bool(self._wanted)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences with such copies."""
        return (seq for seq, _ in self._wanted.values())

    def want(self, seq: Sequence, pairs: _Pairs) -> None:
        self._wanted[seq.id] = seq, pairs

    def drop(self, seq: Sequence) -> None:
        """Note that a step of a sequence is committed, or that it has given up its blocks."""
        self._wanted.pop(seq.id, None)
        self._begun.pop(seq.id, None)

    def late(self, most: int, rank: Callable[[Sequence], float]) -> set[int]:
        """Return the sequences that cannot compute in the next step, if it makes so many copies at most.

        rank  the policy's; among equals the one that started first comes first
        """
        self._wanted = dict(sorted(self._wanted.items(), key=lambda item: -rank(item[1][0])))
        late, count = set(), 0
        for id, (_, pairs) in self._wanted.items():
            count += len(pairs)
            if count > most:
                late.add(id)
        return late

    def take(self, chunks: Iterable[Chunk], most: int) -> _Pairs:
        """Return the copies of the next plan: what these chunks need, and others until there are `most`.

        None of the chunks may be a late sequence's.
        """
        if not self._wanted:
            return []
        taken = [pair for chunk in chunks for pair in self._wanted.pop(chunk.seq.id, (chunk.seq, []))[1]]
        for id, (seq, pairs) in list(self._wanted.items()):
            if (room := most - len(taken)) <= 0:
                break
            taken += pairs[:room]
            self._begun[id] = seq
            if len(pairs) > room:
                self._wanted[id] = seq, pairs[room:]
            else:
                del self._wanted[id]
        return taken

    def misled(self) -> Iterable[Sequence]:
        """Return the sequences that start again once a step has failed.

        It is computed again chunk by chunk, with the copies of each, and these may have copies without a chunk in it.
        """
        return list(self._begun.values())
