"""Groups of layers: the layers of a group share a block table, and a block holds the keys and values of one group.

Layers with a sliding window need fewer tokens than the others, so they have tables of their own. All groups have the
same number of layers, and thus blocks of one size, so that one pool serves them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Each = TypeVar("Each")

_TYPICAL_LENGTH = 8  # of a sequence, in windows
_MOST_WASTE = 1.1  # more layers in a group mean fewer groups, and fewer blocks to keep account of, but more padding


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

    @staticmethod
    def of(windows: Sequence[int | None], longest: int) -> LayerGroups:
        """Group the layers of a model with these sliding windows, for sequences of at most `longest` tokens.

        There is one group if no layer needs all tokens, or if no window is much shorter than a sequence. Else layers
        without a window are the first group, and the size is that of the fewest groups that waste little memory.
        """
        kinds = Counter(None if window is None or 2 * window > longest else window for window in windows)
        if None not in kinds or len(kinds) == 1:
            return LayerGroups.one(len(windows))
        length = min(longest, _TYPICAL_LENGTH * max(window for window in kinds if window))
        groups = {
            size: {window: -(-count // size) for window, count in kinds.items()}
            for size in range(kinds[None], len(windows) + 1)
        }
        slots = {
            size: size * sum(count * (window or length) for window, count in groups[size].items()) for size in groups
        }
        frugal = [size for size in groups if slots[size] <= _MOST_WASTE * min(slots.values())]
        size = min(frugal, key=lambda each: (sum(groups[each].values()), slots[each]))
        numbers: dict[tuple[int | None, int], int] = {(None, 0): 0}
        places, seen = [], Counter[int | None]()
        for window in windows:
            kind = window if window in kinds else None
            part, index = divmod(seen[kind], size)
            places.append((numbers.setdefault((kind, part), len(numbers)), index))
            seen[kind] += 1
        return LayerGroups(size, tuple(window for window, _ in numbers), tuple(places))

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
