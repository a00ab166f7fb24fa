"""The interface of a scenario: servers to compare, a workload for each, and bounds on the figures."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Protocol, TypeAlias

Figures: TypeAlias = dict[str, float]  # of one server in one turn; names end in their unit
Turn: TypeAlias = dict[str, Figures]  # by variant


@dataclass(frozen=True, slots=True)
class Variant:
    """A server, described by arguments of `pagoda serve` in addition to the common ones."""

    name: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bound:
    """
    limit     bound on the median of `values`, which has one entry per turn
    is_floor  `limit` is a lower bound, not an upper one
    """

    promise: str
    limit: float
    values: list[float]
    is_floor: bool = False
    digits: int = 2

    @property
    def is_met(self) -> bool:
        return median(self.values) >= self.limit if self.is_floor else median(self.values) <= self.limit


class Scenario(Protocol):
    """A scenario. Its class's docstring says what it does, and how it chooses what is not given."""

    name: str
    variants: tuple[Variant, ...]

    async def run(self, address: str, vocab_size: int, turn: int) -> Figures:
        """Run against a server that was started for this run alone. `turn` seeds all randomness."""

    def bounds(self, turns: list[Turn]) -> list[Bound]:
        """Return the bounds, from turns that have figures for every variant."""
