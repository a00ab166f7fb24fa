"""Token masks that are not there when a step needs them: a sequence may wait for its mask, its neighbours do not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from ..core.sequence import TokenMask

# How long a step waits for all its masks together. On a device they are needed at its launch, when those of many
# sequences have just been asked for. Where every sequence of the step waits for its mask, only arrivals and aborts do.
MASKS_WAIT_S = 1e-3
LONE_MASKS_WAIT_S = 1e-2


class MaskReader(Protocol):
    """Reads the mask of a sequence in a step, or its masks if it has drafts."""

    def __call__(self, timeout_s: float) -> bool:
        """Read what is there, or is within so many seconds. Return False if a mask is missing."""


def read_masks(readers: Sequence[tuple[TokenMask, MaskReader]], *, has_others: bool) -> list[int]:
    """Read the masks of a step without letting its other sequences wait; return which readers miss some.

    has_others  the step computes sequences that have no reader
    """
    late = [at for at, (_, read) in enumerate(readers) if not read(0.0)]
    if not late:
        return late
    is_alone = not has_others and len(late) == len(readers)
    until = time.monotonic() + (LONE_MASKS_WAIT_S if is_alone else MASKS_WAIT_S)
    missing = []
    for at in late:
        mask, read = readers[at]
        if (mask.is_slow and not is_alone) or not read(max(0.0, until - time.monotonic())):
            missing.append(at)
    return missing
