"""A quantile of the last so many values, kept in order. Standard library only."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class RunningQuantile:
    """
    quantile  0 to 1: 0.99 leaves one value of a hundred above it
    window    values that count
    """

    def __init__(self, quantile: float, window: int) -> None:
        self._quantile = quantile
        self._window = window
        self._values: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        self._values.append(value)
        insort(self._ordered, value)
        if len(self._values) > self._window:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]

    def value(self, default: float) -> float:
        """`default` before the first."""
        if not self._ordered:
            return default
        return self._ordered[min(len(self._ordered) - 1, int(self._quantile * len(self._ordered)))]
