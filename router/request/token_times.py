"""Histograms of the times at which tokens are written. A token costs a search in a short tuple and two additions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values in buckets. One thread changes it.

    bounds  the largest value of each bucket but the last, ascending
    counts  values in each bucket; the last one has no bound
    total   the sum of all values
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


def bounds_between(lowest: int, highest: int, steps: Sequence[float]) -> tuple[float, ...]:
    """These steps in each power of ten from 10^lowest up to 10^highest."""
    return (*(float(f"{step}e{power}") for power in range(lowest, highest) for step in steps), float(f"1e{highest}"))


TOKEN_BOUNDS = bounds_between(-3, 2, (1, 1.5, 2, 3, 5, 7))  # seconds


class TokenTimes:
    """How long the streams of one engine waited for their tokens.

    first    seconds from a call's receipt to its first message
    between  seconds between two tokens of a sequence. A message with k tokens, which came in k steps, counts k times
    """

    __slots__ = ("between", "first")

    def __init__(self) -> None:
        self.first = Histogram(TOKEN_BOUNDS)
        self.between = Histogram(TOKEN_BOUNDS)
