"""Log-probabilities of the chosen token and of the most likely ones, from what the scan found in tiles and groups."""

from __future__ import annotations

import triton
import triton.language as tl

from ..row_sampling import MAX_TOP_LOGPROBS
from .row_sampling_scan import LOG2_E
from .row_sampling_search import GREATEST, LEAST, kth_smallest, list_where

# The N most likely tokens lie in groups whose best is above the N-th best of all groups' bests, of which there are
# fewer than N, and the first N groups whose best equals it.
_MOST_GROUPS = tl.constexpr(triton.next_power_of_2(2 * MAX_TOP_LOGPROBS))


@triton.jit
def _order(x):
    """int32 in the order of floats; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _float_of(order):
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def note_logprobs(
    asked, token, logits, raw_best, raw_mass, raw_group_best, hits, chosen, top_ids, top, vocab, num_tiles, num_groups,
    TILES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, MAX_TOP: tl.constexpr,
):  # fmt: skip
    """Write the log-probabilities that one row asked for. A tile's mass is the sum of exp(logit - the tile's best)."""
    tiles = tl.arange(0, TILES)
    bests = tl.load(raw_best + tiles, mask=tiles < num_tiles, other=-float("inf"))
    masses = tl.load(raw_mass + tiles, mask=tiles < num_tiles, other=0.0)
    best = tl.max(bests, axis=0)
    log_total = best + tl.log(tl.sum(masses * tl.exp2((bests - best) * LOG2_E), axis=0))
    tl.store(chosen, tl.load(logits + token).to(tl.float32) - log_total)
    count = tl.minimum(tl.minimum(asked, MAX_TOP), vocab)
    if count > 0:
        groups = tl.arange(0, GROUPS)
        is_group = groups < num_groups
        # Negated: the greatest come first.
        order = ~_order(tl.load(raw_group_best + groups, mask=is_group, other=-float("inf")))
        nth = kth_smallest(order, count)
        is_level = (order == nth) & is_group
        is_first = tl.cumsum(is_level.to(tl.int32), axis=0) <= count
        num_hits = list_where((order < nth) & is_group | is_level & is_first, hits)

        slots = tl.arange(0, _MOST_GROUPS)
        listed = tl.load(hits + slots, mask=slots < num_hits, other=0)
        ids = listed[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (slots < num_hits)[:, None] & (ids < vocab)
        values = _order(tl.load(logits + ids, mask=inside, other=0.0).to(tl.float32))
        values = tl.reshape(tl.where(inside, values, LEAST), (_MOST_GROUPS * GROUP,))
        ids = tl.reshape(ids, (_MOST_GROUPS * GROUP,))
        for rank in range(0, count):
            value = tl.max(values, axis=0)
            token = tl.min(tl.where(values == value, ids, GREATEST), axis=0)
            tl.store(top_ids + rank, token)
            tl.store(top + rank, _float_of(value) - log_total)
            values = tl.where(ids == token, LEAST, values)
