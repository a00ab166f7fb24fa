"""Groups of layers: the layers of a group share a block table, and a block holds the keys and values of one group.

Layers with a sliding window need fewer tokens than the others, so they have tables of their own. All groups have the
same number of layers, and thus blocks of one size, so that one pool serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Each = TypeVar("Each")


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """
    size     layers of a group, those included that only pad it
    windows  of each group: the tokens that its tables must reach back; None: all. The first group's is None
    places   of each layer: its group, and its index inside the group
    """

    size: int
    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]

    @staticmethod
    def one(num_layers: int) -> LayerGroups:
        """Return one group of all layers, whose tables hold all tokens."""
        return LayerGroups(num_layers, (None,), tuple((0, index) for index in range(num_layers)))

    @property
    def group_of(self) -> tuple[int, ...]:
        """The group of each layer."""
        return tuple(group for group, _ in self.places)

    def of_layers(self, pages: Sequence[Each]) -> list[Each]:
        """Return what belongs to each layer, if it belongs to an index inside every group."""
        return [pages[index] for _, index in self.places]

    def attended(self, windows: Sequence[Each]) -> list[set[Each]]:
        """Return the different windows of each group's layers, given those of all layers."""
        found: list[set[Each]] = [set() for _ in self.windows]
        for (group, _), window in zip(self.places, windows, strict=True):
            found[group].add(window)
        return found
