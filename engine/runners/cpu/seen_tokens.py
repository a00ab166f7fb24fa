"""Which tokens a sequence has seen: what penalties need, kept up as the sequence grows."""

from __future__ import annotations

import numpy as np

from pagoda_server.engine.core.sequence import Sequence


class SeenTokens:
    """The distinct tokens of one sequence, and how often its output holds each. A new token costs constant time."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self._index: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)
        self._num_followed = 0

    def follow(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [distinct] int64 and counts in the output [distinct] float32, up to the sequence's last token.

        Views that are valid until the next call.
        """
        for position in range(self._num_followed, self.seq.num_tokens):
            at = self._place(self.seq.tokens[position])
            if position >= self.seq.prompt_len:
                self._counts[at] += 1
        self._num_followed = self.seq.num_tokens
        num_distinct = len(self._index)
        return self._ids[:num_distinct], self._counts[:num_distinct]

    def _place(self, token: int) -> int:
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = len(self._index)
            if at == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
            self._ids[at], self._counts[at] = token, 0
        return at
