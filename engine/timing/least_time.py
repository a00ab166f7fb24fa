"""The least time that a sequence still needs, whatever else runs: a lower bound, learned. Standard library only."""

from __future__ import annotations

import math

from pagoda_server.engine.core.sequence import Sequence

WINDOW = 256  # steps; the fastest of the last one or two windows counts
SAFETY = 0.5  # no step to come takes less than this part of the fastest


class RecentMinimum:
    """The least of the last 256 to 512 values."""

    def __init__(self) -> None:
        self._previous = self._current = math.inf
        self._count = 0

    def add(self, value: float) -> None:
        self._current = min(self._current, value)
        self._count += 1
        if self._count == WINDOW:
            self._previous, self._current, self._count = self._current, math.inf, 0

    @property
    def value(self) -> float:
        """0 if there have been none: of what nobody knows nothing is claimed."""
        least = min(self._previous, self._current)
        return least if least < math.inf else 0.0


class LeastTime:
    """Steps that a sequence needs at least, times the time that such a step takes at least.

    Prompt tokens that no cache holds are computed by somebody, `token_budget` in a step at most; the last of them gives
    the first token. Steps of at least half a budget bound a full one from below, any step bounds the others.
    """

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        self._any = RecentMinimum()
        self._large = RecentMinimum()

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._any.add(seconds)
        if 2 * num_tokens >= self._token_budget:
            self._large.add(seconds)

    def of(self, seq: Sequence, num_uncomputed: int) -> float:
        """Seconds until the token before which it cannot end: the first, or number min_tokens of its output."""
        full_steps = (num_uncomputed - 1) // self._token_budget
        other_steps = max(1, seq.params.min_tokens - seq.output_len)
        least = self._any.value
        return SAFETY * (full_steps * max(least, self._large.value) + other_steps * least)
