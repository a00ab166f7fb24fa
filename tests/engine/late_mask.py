"""A mask that is late as long as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pagoda_server.engine.core.sequence import TokenMask


class LateMask:
    """Another TokenMask, there while the gate is open. It waits for the gate as long as it may.

    is_late  of these tokens, too, though the gate is open; None: of none
    """

    depends_on_tokens = True
    field = "guided"
    error = ""

    def __init__(
        self, mask: TokenMask, gate: threading.Event, is_late: Callable[[list[int]], bool] | None = None
    ) -> None:
        self.is_slow = False
        self.waited: list[float] = []
        self._mask = mask
        self._gate = gate
        self._is_late = is_late

    @property
    def fault(self) -> str:
        return self._mask.fault

    def is_ready(self, tokens: list[int], timeout_s: float) -> bool:
        self.waited.append(timeout_s)
        return self._gate.wait(timeout_s) and (self._is_late is None or not self._is_late(tokens))

    def surely_allows(self, tokens: list[int], token: int) -> bool:
        is_there = self._gate.is_set() and (self._is_late is None or not self._is_late(tokens))
        return is_there and self._mask.surely_allows(tokens, token)

    def fill(self, tokens: list[int], words: memoryview) -> None:
        assert self._gate.is_set(), "a step waits for the mask"
        self._mask.fill(tokens, words)

    def follow(self, tokens: list[int]) -> list[int] | None:
        return self._mask.follow(tokens)
