"""How many prompt tokens an engine has yet to compute, for routers that choose between engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

from ..core.sequence import Sequence
from .policy import Policy

COUNT_EVERY_S = 0.25  # no router gets the load more often than that, unless it gets tokens too
MOST_LOOKED_UP = 32  # waiting sequences for which the prefix cache is searched; the others count like them on average


class Backlog:
    """
    num_cached  counts the leading tokens of a waiting sequence that need not be computed
    """

    def __init__(self, clock: Callable[[], float], num_cached: Callable[[Sequence], int]) -> None:
        self._clock = clock
        self._num_cached = num_cached
        self._counted_at = -math.inf
        self._tokens = 0

    def tokens(self, running: list[Sequence], waiting: Policy) -> int:
        """Count the tokens, or return the last count if that is recent."""
        if not running and not waiting:
            self._tokens, self._counted_at = 0, -math.inf
        elif (now := self._clock()) - self._counted_at >= COUNT_EVERY_S:
            self._tokens, self._counted_at = self._count(running, waiting), now
        return self._tokens

    def _count(self, running: list[Sequence], waiting: Policy) -> int:
        lengths = [length for seq in running if (length := seq.remaining_len) > 1]
        looked_up = [seq.remaining_len - self._num_cached(seq) for seq in islice(waiting, MOST_LOOKED_UP)]
        return sum(lengths) + sum(looked_up) * len(waiting) // max(1, len(looked_up))
