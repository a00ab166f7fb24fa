"""What a scenario is: servers to compare, what is done to each of them, and the bounds that the figures are held to."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Protocol, TypeAlias

Figures: TypeAlias = dict[str, float]  # of one server in one turn; names end in their unit
Turn: TypeAlias = dict[str, Figures]  # by variant


@dataclass(frozen=True, slots=True)
class Variant:
    """A server, by its arguments of `pagoda serve` beyond those that all have."""

    name: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bound:
    """
    limit     of the median of `values`, which has one entry a turn
    is_floor  `limit` is the least that is promised, not the most
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
    """Its class's docstring says what is done, and how what is not given was chosen."""

    name: str
    variants: tuple[Variant, ...]

    async def run(self, address: str, vocab_size: int, turn: int) -> Figures:
        """Against a server that has been started for this alone. `turn` seeds whatever is random."""

    def bounds(self, turns: list[Turn]) -> list[Bound]:
        """Of figures that every turn has for every variant."""
