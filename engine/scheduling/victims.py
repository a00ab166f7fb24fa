"""Which sequence is preempted when blocks run out.

The lowest rank goes first; among equals, the sequence that wastes the fewest computed tokens for each block that it
frees. Blocks that others share are neither freed nor lost. A sequence that comes back gets one block more than it
fills, and its equals cannot preempt it until that block is full. They preempt it at most once before its first token,
and then once for each block of tokens that it has generated: admission and preemption cannot chase each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from pagoda_server.engine.core.sequence import Sequence, State
from pagoda_server.engine.kv.blocks import BlockPool


def is_protected(seq: Sequence) -> bool:
    return seq.state is State.RUNNING and seq.num_tokens + seq.num_pending <= seq.protected_len


def num_freed(seq: Sequence, pool: BlockPool) -> int:
    """Blocks that are available once it has given up its own, and its peers theirs."""
    if not seq.peers:
        return len(seq.blocks) - pool.num_shared(seq.blocks)
    users = Counter(block for row in seq.peers for block in row.blocks)
    return sum(pool.num_users(block) == count for block, count in users.items())


def num_freed_by(seqs: Iterable[Sequence], pool: BlockPool) -> int:
    """And once all of these have: of each beam search every row is among them."""
    return sum(num_freed(seq, pool) for seq in seqs if not seq.is_led)


def choose_victim(candidates: Iterable[Sequence], rank: Callable[[Sequence], float], pool: BlockPool) -> Sequence:
    """Choose the sequence that gives up its blocks; of equals the last."""

    def cost(seq: Sequence) -> tuple[float, float]:
        freed = num_freed(seq, pool)
        unused = sum(len(row.blocks) * pool.block_size - row.num_computed for row in seq.peers or (seq,))
        wasted = max(0, freed * pool.block_size - unused)
        return rank(seq), wasted / freed if freed else float("inf")

    return min(reversed(list(candidates)), key=cost)
