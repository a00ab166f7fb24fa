"""A mask that depends on the tokens: each token must be a neighbour of the one before it."""

from __future__ import annotations


class NextToLast:
    """A TokenMask that allows the ids beside the last token's. It notes for how many tokens it was asked."""

    depends_on_tokens = True
    field = "guided"
    fault = ""
    is_slow = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.asked: list[int] = []

    def is_ready(self, tokens: list[int], timeout_s: float) -> bool:
        return True

    def surely_allows(self, tokens: list[int], token: int) -> bool:
        return abs(token - tokens[-1]) == 1

    def fill(self, tokens: list[int], words: memoryview) -> None:
        self.asked.append(len(tokens))
        for id in (tokens[-1] - 1, tokens[-1] + 1):
            if 0 <= id < self._vocab_size:
                words[id // 32] |= 1 << (id % 32)

    def follow(self, tokens: list[int]) -> list[int]:
        return []
