"""A LoRA adapter that the engine holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(slots=True, eq=False)
class Adapter:
    """Adapters are compared by their identities.

    identity   SHA-256 of what was read: equal ones compute equal tokens
    rank       its largest
    num_bytes  of memory that it takes
    weights    what the runner has made of it
    is_pinned  it keeps its slot once it has one
    """

    identity: bytes
    rank: int
    num_bytes: int
    weights: object
    is_pinned: bool = False


class AdapterLoader(Protocol):
    """Reads adapters for a model.

    num_slots  adapters that the sequences of a step can have
    max_rank   of an adapter
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def max_rank(self) -> int: ...

    def load(self, path: Path) -> Adapter:
        """Read an adapter, on any thread. Raises CheckpointError, or FileNotFoundError if nothing is there."""
