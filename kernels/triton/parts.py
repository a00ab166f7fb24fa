"""How decodes are divided: contexts become parts of about equal work, by the lengths that are on the device.

A part has about one of `num_shares` shares of all tokens that are to be read, rounded up, so there are no more parts
than shares and sequences: a grid that is fixed before the lengths are known. A context's parts are of equal length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagoda_server.kernels.triton.attention_tile import SEQS

MIN_TILES = tl.constexpr(4)  # a part has: a shorter one would not pay for its merge


@triton.jit
def visible_len(context_len_ptr, seq, num_seqs, WINDOW: tl.constexpr):
    """Tokens of its context that a sequence's query sees; none of one that there is not."""
    num_keys = tl.load(context_len_ptr + seq, mask=seq < num_seqs, other=0)
    return tl.minimum(num_keys, WINDOW) if WINDOW else num_keys


@triton.jit
def part_limit(context_len_ptr, num_seqs, num_shares, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Tokens of a part at most, a multiple of TILE: one share of all that is to be read."""
    num_keys = 0
    # Sums of vectors over the loop would hide from Triton how the addresses below are aligned.
    for first in range(0, num_seqs, SEQS):
        num_keys += tl.sum(visible_len(context_len_ptr, first + tl.arange(0, SEQS), num_seqs, WINDOW), axis=0)
    share = tl.cdiv(num_keys, num_shares)
    return tl.maximum(tl.cdiv(share, TILE), MIN_TILES) * TILE


@triton.jit
def find_part(item, context_len_ptr, num_seqs, num_shares, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The sequence and the tokens of an item of work, and how many parts that context has; none: sequence num_seqs."""
    limit = part_limit(context_len_ptr, num_seqs, num_shares, WINDOW, TILE)
    seq, first_item, num_items = 0, 0, 0  # sequences whose items all come before, their items, and those looked at
    for first in range(0, num_seqs, SEQS):
        splits = tl.cdiv(visible_len(context_len_ptr, first + tl.arange(0, SEQS), num_seqs, WINDOW), limit)
        ends = num_items + tl.cumsum(splits, axis=0)
        seq += tl.sum((ends <= item).to(tl.int32), axis=0)
        first_item = tl.maximum(first_item, tl.max(tl.where(ends <= item, ends, 0), axis=0))
        num_items += tl.sum(splits, axis=0)
    seq = tl.minimum(seq, num_seqs)
    context = tl.load(context_len_ptr + seq, mask=seq < num_seqs, other=0)
    num_keys = visible_len(context_len_ptr, seq, num_seqs, WINDOW)
    num_splits = tl.cdiv(num_keys, limit)
    length = tl.cdiv(tl.cdiv(num_keys, tl.maximum(num_splits, 1)), TILE) * TILE
    begin = context - num_keys + (item - first_item) * length
    return seq, begin, tl.minimum(begin + length, context), num_splits
