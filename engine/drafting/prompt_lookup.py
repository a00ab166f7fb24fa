"""Drafts from a sequence's own tokens: what followed the last ones when they occurred before.

Prompt lookup decoding (Saxena, 2023; in the family of Yang et al., 2023, "Inference with Reference"). It costs a few
lookups, and pays where an answer repeats its prompt or itself: summaries, edits of code, extracts.
"""

from __future__ import annotations

from ..core.sequence import Sequence

SIZES = (4, 3, 2)  # tokens of an n-gram, the longest first: it is followed by the same token most often
_BITS = 24  # of a token id: no vocabulary is larger
INDEXED_AT_ONCE = 16_384  # tokens, by one proposal for each sequence: about 20 ms, in which no other stream goes on
_LEAST_INDEXED = 64  # more than a step can add to a sequence


class PromptLookup:
    """Remembers where each n-gram of a sequence occurred last. A new token costs constant time and memory.

    A long prompt is indexed over several proposals, which until then know its first part only.
    """

    token_s = 0.0

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def propose(self, seq: Sequence, most: int) -> list[int]:
        index = self._indexes.get(seq.id)
        if index is None or index.seq is not seq:
            index = self._indexes[seq.id] = _Index(seq)
        index.extend(max(_LEAST_INDEXED, INDEXED_AT_ONCE // len(self._indexes)))
        return index.propose(most)

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq.id, None)


class _Index:
    """The n-grams of one sequence that have a token behind them, by the position of that token."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self._behind: dict[int, int] = {}
        self._num_indexed = min(SIZES)  # n-grams that end before this position are in the index

    def extend(self, count: int) -> None:
        """Index the n-grams before the next `count` positions, as far as these exist."""
        tokens, start = self.seq.tokens, self._num_indexed
        self._num_indexed = max(start, min(len(tokens), start + count))
        for position in range(start, self._num_indexed):
            for key in _keys(tokens, position):
                self._behind[key] = position

    def propose(self, most: int) -> list[int]:
        """Return up to `most` tokens that followed the longest of the last n-grams, where it occurred last."""
        tokens = self.seq.tokens
        end = len(tokens)
        for key in _keys(tokens, end):
            if (found := self._behind.get(key)) is not None:
                period = end - found  # what was found may reach the end; the last tokens then repeat
                return [tokens[found + index % period] for index in range(most)]
        return []


def _keys(tokens: list[int], end: int) -> list[int]:
    """Return the n-grams that end before a position, as numbers: the longest first."""
    keys = []
    for size in SIZES:
        if size <= end:
            key = size
            for token in tokens[end - size : end]:
                key = key << _BITS | token
            keys.append(key)
    return keys
