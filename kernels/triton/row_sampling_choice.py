"""The second pass: one program a row merges the tiles, and draws where a rule limits what can be drawn.

Such a draw looks only at groups of adjacent tokens whose best one can matter. The k most likely tokens lie in groups
whose best is at least the k-th best of all groups' bests; for top-p the LEADING best groups usually hold enough of the
probability, and if they do not, it looks at all. It lists the tokens that can matter next to each other, and searches
among them: of a flat distribution that is some of the vocabulary, not all of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent_launch import await_previous
from .gumbel import gumbel
from .row_sampling_logprobs import note_logprobs
from .row_sampling_scan import (
    LOG2_E,
    MIN_P,
    NUM_INTEGERS,
    NUM_LOGPROBS,
    NUM_NUMBERS,
    TEMPERATURE,
    TOP_K,
    TOP_N_SIGMA,
    TOP_P,
    distance,
    draws_of,
    noise_of,
    penalties_of,
)
from .row_sampling_search import (
    GREATEST,
    LEAST,
    PIVOTS,
    kth_smallest,
    list_where,
    narrowed,
    pivots_of,
    span_of,
)

LEADING = tl.constexpr(256)
_MARGIN = tl.constexpr(1.0)  # of a distance: far more than what rounding may hide
_INFINITE = tl.constexpr(0x7F800000)  # the bits of +inf


@triton.jit
def _bits(distances):
    """int32 in the order of distances, which are never negative."""
    return distances.to(tl.int32, bitcast=True)


@triton.jit
def _weights(bits):
    """exp(-distance) of their bits."""
    return tl.exp2(-bits.to(tl.float32, bitcast=True) * LOG2_E)


@triton.jit
def _gather(
    cut, best, t, logits, adjusted, is_changed, hits, num_hits, near, near_ids, vocab,
    CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the distances up to `cut`, as bits, and ids of the listed groups' tokens. Return how many there are."""
    tl.debug_barrier()  # distances that stand there were read
    num_near = tl.full((), 0, tl.int32)
    for start in range(0, num_hits, CHUNK // GROUP):
        slots = start + tl.arange(0, CHUNK // GROUP)
        groups = tl.load(hits + slots, mask=slots < num_hits, other=0)
        ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (slots < num_hits)[:, None] & (ids < vocab)
        if is_changed:
            x = tl.load(adjusted + ids, mask=inside, other=-float("inf"))
        else:
            x = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
        bits = _bits(distance(x, best, t))
        is_near = tl.reshape(inside & (bits <= cut), (CHUNK,))
        places = num_near + tl.cumsum(is_near.to(tl.int32), axis=0) - 1
        tl.store(near + places, tl.reshape(bits, (CHUNK,)), mask=is_near)
        tl.store(near_ids + places, tl.reshape(ids, (CHUNK,)), mask=is_near)
        num_near += tl.sum(is_near.to(tl.int32), axis=0)
    tl.debug_barrier()
    return num_near


@triton.jit
def _mass_within(cut, near, num_near, CHUNK: tl.constexpr):
    """The sum of exp(-distance) up to `cut`, float64."""
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, num_near, CHUNK):
        at = start + tl.arange(0, CHUNK)
        bits = tl.load(near + at, mask=at < num_near, other=_INFINITE)
        mass += tl.sum(tl.where(bits <= cut, _weights(bits), 0.0), axis=0).to(tl.float64)
    return mass


@triton.jit
def _search(high, target, near, num_near, BY_MASS: tl.constexpr, CHUNK: tl.constexpr):
    """The least distance, up to `high`, within which so many tokens lie, or tokens of so much mass; else the greatest.

    Sums of a chunk are float32 trees, sums of chunks float64: a mass is right to about a millionth.
    """
    low = tl.full((), 0, tl.int32)
    while low < high:
        pivots = pivots_of(low, high)
        least, greatest = tl.full((), GREATEST, tl.int32), tl.full((), LEAST, tl.int32)
        reached = tl.zeros((PIVOTS,), tl.float64 if BY_MASS else tl.int32)
        for start in range(0, num_near, CHUNK):
            at = start + tl.arange(0, CHUNK)
            bits = tl.load(near + at, mask=at < num_near, other=_INFINITE)
            is_within = bits[None, :] <= pivots[:, None]
            if BY_MASS:
                reached += tl.sum(tl.where(is_within, _weights(bits)[None, :], 0.0), axis=1).to(tl.float64)
            else:
                reached += tl.sum(is_within.to(tl.int32), axis=1)
            chunk_least, chunk_greatest = span_of(bits, low, high)
            least, greatest = tl.minimum(least, chunk_least), tl.maximum(greatest, chunk_greatest)
        low, high = narrowed(low, high, pivots, reached >= target, least, greatest)
    return high


@triton.jit
def _deviation(moments, tile_best, best, t, num_tiles, TILES: tl.constexpr):
    """The standard deviation of a row's distances, from the moments of its tiles (Chan et al., 1979)."""
    tiles = tl.arange(0, TILES)
    is_tile = tiles < num_tiles
    counts = tl.load(moments + tiles, mask=is_tile, other=0.0).to(tl.float64)
    means = tl.load(moments + num_tiles + tiles, mask=is_tile, other=0.0)
    spreads = tl.load(moments + 2 * num_tiles + tiles, mask=is_tile, other=0.0).to(tl.float64)
    means += distance(tl.load(tile_best + tiles, mask=is_tile, other=-float("inf")), best, t)
    means = tl.where(counts > 0, means, 0.0).to(tl.float64)
    count = tl.sum(counts, axis=0)
    difference = means - tl.sum(counts * means, axis=0) / count
    variance = tl.sum(spreads + counts * difference * difference, axis=0) / count
    return tl.sqrt(variance.to(tl.float32))


@triton.jit
def _draw_limited(
    numbers, integers, key, best, logits, adjusted, is_changed, hits, near, near_ids, group_best, tile_best, tile_mass,
    moments, vocab, num_tiles,
    TILES: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    t, k, p = tl.load(numbers + TEMPERATURE), tl.load(integers + TOP_K), tl.load(numbers + TOP_P)
    is_topped = (k > 0) & (k < vocab)
    groups, num_groups = tl.arange(0, GROUPS), num_tiles * (TILE // GROUP)
    nearest = _bits(distance(tl.load(group_best + groups, mask=groups < num_groups, other=-float("inf")), best, t))
    nearest = tl.where(groups < num_groups, nearest, GREATEST)

    # Min-p and top-nσ are distances, but top-k comes before them: where there is one, its tokens are those to look at.
    least_likely = _bits(0.0 - tl.log(tl.load(numbers + MIN_P)))
    sigmas = tl.load(numbers + TOP_N_SIGMA)
    if sigmas > 0:
        deviation = _deviation(moments, tile_best, best, t, num_tiles, TILES)
        least_likely = tl.minimum(least_likely, _bits(sigmas * deviation))
    reach = tl.where(is_topped, _INFINITE, least_likely)
    total = tl.full((), 0.0, tl.float64)
    if (p < 1) & (not is_topped):
        tiles = tl.arange(0, TILES)
        masses = tl.load(tile_mass + tiles, mask=tiles < num_tiles, other=0.0)
        bests = tl.load(tile_best + tiles, mask=tiles < num_tiles, other=-float("inf"))
        total = tl.sum((masses * _weights(_bits(distance(bests, best, t)))).to(tl.float64), axis=0)
        # Beyond this distance all tokens together have less than a share of 1 - p, even if all are there.
        beyond = tl.log(vocab.to(tl.float32)) - tl.log(1 - p) - tl.log(total.to(tl.float32)) + _MARGIN
        reach = tl.minimum(reach, _bits(tl.maximum(beyond, 0.0)))
    wanted = tl.where(is_topped, k, LEADING)
    cut = reach
    if (is_topped | (p < 1)) & (wanted <= num_groups):
        cut = tl.minimum(reach, kth_smallest(nearest, wanted))
    num_hits = list_where(nearest <= cut, hits)
    num_near = _gather(
        cut, best, t, logits, adjusted, is_changed, hits, num_hits, near, near_ids, vocab, CHUNK, GROUP
    )  # fmt: skip
    if is_topped:
        cut = _search(cut, k, near, num_near, False, CHUNK)
    if p < 1:
        mass = _mass_within(cut, near, num_near, CHUNK)
        if is_topped:
            total = mass
        elif (mass < total * p.to(tl.float64)) & (cut < reach):
            cut = reach
            num_hits = list_where(nearest <= cut, hits)
            num_near = _gather(
                cut, best, t, logits, adjusted, is_changed, hits, num_hits, near, near_ids, vocab, CHUNK, GROUP
            )  # fmt: skip
        cut = _search(cut, total * p.to(tl.float64), near, num_near, True, CHUNK)
    cut = tl.minimum(cut, least_likely)

    best_score, token = tl.full((), -float("inf"), tl.float32), tl.full((), 0, tl.int32)
    for start in range(0, num_near, CHUNK):
        at = start + tl.arange(0, CHUNK)
        bits = tl.load(near + at, mask=at < num_near, other=_INFINITE)
        ids = tl.load(near_ids + at, mask=at < num_near, other=0)
        scores = tl.where(bits <= cut, gumbel(key, ids) - bits.to(tl.float32, bitcast=True), -float("inf"))
        score = tl.max(scores, axis=0)
        if score > best_score:
            best_score = score
            token = tl.min(tl.where(scores == score, ids, GREATEST), axis=0)
    return token


@triton.jit
def choice_kernel(
    # the step; ranks is None where no sequence can have drafts
    logits, rows, positions, ranks,
    # the sequences' rows
    numbers, integers, counts, last_token,
    # of the scan: see Partials
    adjusted, is_changed, tile_best, tile_token, tile_score, tile_mass, group_best, moments, raw_best, raw_mass,
    raw_group_best, hits, near, near_ids,
    # results
    tokens, chosen, top_ids, top,
    vocab, logits_stride, num_tiles,
    TILE: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
    MAX_TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at).to(tl.int64)
    if row < 0:
        return
    numbers += row * NUM_NUMBERS
    integers += row * NUM_INTEGERS
    num_groups = num_tiles * (TILE // GROUP)
    logits += at * logits_stride
    hits += at * num_groups
    tiles = tl.arange(0, TILES)
    is_tile = tiles < num_tiles
    bests = tl.load(tile_best + at * num_tiles + tiles, mask=is_tile, other=-float("inf"))
    best, leader = tl.max(bests, axis=0, return_indices=True)
    if tl.abs(best) == float("inf"):
        tl.store(tokens + at, -1)
        return

    draws, _, is_limited = draws_of(numbers, integers, vocab)
    if draws & is_limited:
        key = noise_of(integers, tl.load(positions + at))
        token = _draw_limited(
            numbers, integers, key, best, logits, adjusted + at * vocab, tl.load(is_changed + at) != 0, hits,
            near + at * num_groups * GROUP, near_ids + at * num_groups * GROUP, group_best + at * num_groups,
            tile_best + at * num_tiles, tile_mass + at * num_tiles,
            moments + 3 * at * num_tiles, vocab, num_tiles,
            TILES, GROUPS, TILE, CHUNK, GROUP,
        )  # fmt: skip
    else:
        if draws:
            scores = tl.load(tile_score + at * num_tiles + tiles, mask=is_tile, other=-float("inf"))
            scores -= distance(bests, best, tl.load(numbers + TEMPERATURE))
            leader = tl.argmax(scores, axis=0)
        token = tl.load(tile_token + at * num_tiles + leader)

    tl.store(tokens + at, token)
    is_noted = True
    if ranks is not None:
        is_noted = tl.load(ranks + at) == 0
    tl.store(last_token + row, token, mask=is_noted)
    _, _, _, has_penalties = penalties_of(numbers)
    if has_penalties & is_noted:
        count = counts + row * vocab + token
        tl.store(count, tl.load(count) + 1)
    asked = tl.load(integers + NUM_LOGPROBS)
    if asked >= 0:
        note_logprobs(
            asked, token, logits, raw_best + at * num_tiles, raw_mass + at * num_tiles,
            raw_group_best + at * num_groups, hits, chosen + at, top_ids + at * MAX_TOP, top + at * MAX_TOP,
            vocab, num_tiles, num_groups, TILES, GROUPS, GROUP, MAX_TOP,
        )  # fmt: skip
