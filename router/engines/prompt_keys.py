"""The stride keys of prompts, many of which begin alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ...channel.strides import STRIDE_BYTES, full_strides, keys_of_strides

PIECE_STRIDES = 16  # of 1,024 tokens
PIECE_BYTES = PIECE_STRIDES * STRIDE_BYTES
MOST_PIECES = 4096


class PromptKeys:
    """Computes stride keys, and keeps those of the pieces of prompts that came last: they are found sooner.

    A piece is known by Python's hash of it and of the key before it. That hash has a secret of the process, and a key
    is a hint, so equal hashes of two pieces cost time at worst. No text of a client is kept.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, list[int]] = OrderedDict()  # the piece that came last is at the end

    def __len__(self) -> int:
        return len(self._known)

    def of(self, first_key: int, tokens: Sequence[int]) -> list[int]:
        """Return what stride_keys(first_key, tokens) does."""
        known, content, keys = self._known, full_strides(tokens), list[int]()
        for start in range(0, len(content), PIECE_BYTES):
            previous = keys[-1] if keys else first_key
            name = hash((previous, content[start : start + PIECE_BYTES]))
            if (found := known.get(name)) is None:
                # One more piece is kept each time that a prompt comes: most prompts come once.
                keys += keys_of_strides(previous, content[start:])
                first = start // STRIDE_BYTES
                known[name] = keys[first : first + PIECE_STRIDES]
                if len(known) > MOST_PIECES:
                    known.popitem(last=False)
                break
            known.move_to_end(name)
            keys += found
        return keys
