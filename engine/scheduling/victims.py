"""Which sequence is preempted when blocks run out.

The lowest rank goes first; among equals, the sequence that wastes the fewest computed tokens for each block that it
frees. Blocks that others share are neither freed nor lost. A sequence that comes back gets one block more than it
fills, and its equals cannot preempt it until that block is full. They preempt it at most once before its first token,
and then once for each block of tokens that it has generated: admission and preemption cannot chase each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..core.sequence import Sequence
from ..kv.blocks import BlockPool


def num_freed(seq: Sequence, pool: BlockPool) -> int:
    """Count the blocks that are available once a sequence has given up its own."""
    return len(seq.blocks) - pool.num_shared(seq.blocks) + seq.blocks.quota


def choose_victim(candidates: Iterable[Sequence], rank: Callable[[Sequence], float], pool: BlockPool) -> Sequence:
    """Choose the sequence that gives up its blocks; of equals the last."""

    def cost(seq: Sequence) -> tuple[float, float]:
        freed = num_freed(seq, pool)
        unused = len(seq.blocks) * pool.block_size - seq.num_computed
        wasted = max(0, (freed - seq.blocks.quota) * pool.block_size - unused)
        return rank(seq), wasted / freed if freed else float("inf")

    return min(reversed(list(candidates)), key=cost)
