"""Pivot search: the k-th smallest of values, or how far a share of the probability reaches, without a sort.

Values are the bits of floats, as int32 in the floats' order. A pass counts what is at or below PIVOTS values at once
and leaves one interval between two of them, cut down to the values that exist in it; so it ends after a few passes,
and after 11 whatever the values are.
"""

from __future__ import annotations

import triton
import triton.language as tl

PIVOTS = tl.constexpr(8)
GREATEST = tl.constexpr(0x7FFFFFFF)
LEAST = tl.constexpr(-0x80000000)


@triton.jit
def pivots_of(low, high):
    """[PIVOTS] int32 from `low` on, below `high`, evenly spaced."""
    span = high.to(tl.int64) - low
    return (low + span * tl.arange(0, PIVOTS) // PIVOTS).to(tl.int32)


@triton.jit
def span_of(values, low, high):
    """The least and the greatest of the values within [low, high]."""
    inside = (values >= low) & (values <= high)
    least = tl.min(tl.where(inside, values, GREATEST), axis=0)
    return least, tl.max(tl.where(inside, values, LEAST), axis=0)


@triton.jit
def narrowed(low, high, pivots, is_enough, least, greatest):
    """The interval around the first pivot that is enough, cut down to the values in it."""
    new_low = tl.max(tl.where(is_enough, low, pivots + 1), axis=0)
    new_high = tl.min(tl.where(is_enough, pivots, high), axis=0)
    return tl.maximum(new_low, least), tl.minimum(new_high, greatest)


@triton.jit
def kth_smallest(values, k):
    """The k-th smallest of [n] int32, or the greatest if there are fewer."""
    low, high = tl.min(values, axis=0), tl.max(values, axis=0)
    while low < high:
        pivots = pivots_of(low, high)
        counts = tl.sum((values[None, :] <= pivots[:, None]).to(tl.int32), axis=1)
        least, greatest = span_of(values, low, high)
        low, high = narrowed(low, high, pivots, counts >= k, least, greatest)
    return high


@triton.jit
def list_where(wanted, target):
    """Writes the indices at which `wanted` [n] holds, ascending, and returns how many there are."""
    tl.debug_barrier()  # a list that stands there was read
    tl.store(target + tl.cumsum(wanted.to(tl.int32), axis=0) - 1, tl.arange(0, wanted.shape[0]), mask=wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), axis=0)
