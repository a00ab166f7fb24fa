"""The first pass over a batch's logits: many programs a row, each reduces one tile of the vocabulary.

What a row does not ask for, none of its programs computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..row_sampling import COLUMNS, IN_PROMPT, INTEGERS, NUMBERS, SMALLEST_TEMPERATURE
from .dependent_launch import await_previous
from .gumbel import gumbel, noise_key

LOG2_E = tl.constexpr(1.4426950408889634)
_SMALLEST_TEMPERATURE = tl.constexpr(SMALLEST_TEMPERATURE)
_TIMES = tl.constexpr(IN_PROMPT - 1)

# The columns of a row's parameters.
NUM_NUMBERS, NUM_INTEGERS = tl.constexpr(len(NUMBERS)), tl.constexpr(len(INTEGERS))
TEMPERATURE = tl.constexpr(COLUMNS["temperature"])
TOP_P = tl.constexpr(COLUMNS["top_p"])
MIN_P = tl.constexpr(COLUMNS["min_p"])
TOP_N_SIGMA = tl.constexpr(COLUMNS["top_n_sigma"])
REPETITION = tl.constexpr(COLUMNS["repetition_penalty"])
PRESENCE = tl.constexpr(COLUMNS["presence_penalty"])
FREQUENCY = tl.constexpr(COLUMNS["frequency_penalty"])
TOP_K = tl.constexpr(COLUMNS["top_k"])
SEED_LOW = tl.constexpr(COLUMNS["seed_low"])
SEED_HIGH = tl.constexpr(COLUMNS["seed_high"])
NUM_LOGPROBS = tl.constexpr(COLUMNS["num_logprobs"])
_MIN_POSITION = tl.constexpr(COLUMNS["min_position"])
_IS_MASKED = tl.constexpr(COLUMNS["is_masked"])
_NUM_STOPS = tl.constexpr(COLUMNS["num_stops"])
_NUM_BIASES = tl.constexpr(COLUMNS["num_biases"])


@triton.jit
def draws_of(numbers, integers, vocab):
    """Whether a row's token is drawn, whether top-k limits that, and whether anything does."""
    k = tl.load(integers + TOP_K)
    draws = (tl.load(numbers + TEMPERATURE) >= _SMALLEST_TEMPERATURE) & (k != 1)
    is_topped = (k > 0) & (k < vocab)
    is_limited = is_topped | (tl.load(numbers + TOP_P) < 1) | (tl.load(numbers + MIN_P) > 0)
    is_limited |= tl.load(numbers + TOP_N_SIGMA) > 0
    return draws, is_topped, is_limited


@triton.jit
def penalties_of(numbers):
    """A row's penalties for repetition, presence and frequency, and whether it has any."""
    r, p, f = tl.load(numbers + REPETITION), tl.load(numbers + PRESENCE), tl.load(numbers + FREQUENCY)
    return r, p, f, (r != 1) | (p != 0) | (f != 0)


@triton.jit
def noise_of(integers, position):
    """The key of a row's noise at a position."""
    return noise_key(tl.load(integers + SEED_LOW), tl.load(integers + SEED_HIGH), position)


@triton.jit
def distance(x, best, temperature):
    """How far logits are below the best one, in temperatures: the reference's scaled logits, negated. +inf for -inf.

    Never -0.0, which the best of a row of zeros of both signs would have: its bits are not in the order of distances.
    """
    return tl.math.div_rn(best - x, temperature) + 0.0


@triton.jit
def _penalised(x, count, repetition, presence, frequency):
    times = (count & _TIMES).to(tl.float32)
    scaled = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
    return scaled - (tl.where(times > 0, presence, 0.0) + frequency * times)


@triton.jit
def _moments_of(distances):
    """The number of finite values, their mean, and the sum of their squared differences from it."""
    is_finite = distances < float("inf")
    count = tl.sum(is_finite.to(tl.float32), axis=0)
    mean = tl.sum(tl.where(is_finite, distances, 0.0), axis=0) / tl.maximum(count, 1.0)
    difference = tl.where(is_finite, distances - mean, 0.0)
    return count, mean, tl.sum(difference * difference, axis=0)


@triton.jit
def scan_kernel(
    # the step; ranks and step_tokens are None where no sequence can have drafts
    logits, rows, positions, ranks, step_tokens,
    # the sequences' rows
    numbers, integers, stop_ids, bias_ids, bias, token_masks, counts,
    # results, one a tile or a group: see Partials
    adjusted, is_changed, tile_best, tile_token, tile_score, tile_mass, group_best, moments, raw_best, raw_mass,
    raw_group_best,
    vocab, logits_stride, max_stops, max_biases, num_words, max_rows,
    TILE: tl.constexpr, GROUP: tl.constexpr, STOPS: tl.constexpr, BIASES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    tile, at, num_tiles = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    row = tl.load(rows + at).to(tl.int64)
    if row < 0:
        return
    numbers += row * NUM_NUMBERS
    integers += row * NUM_INTEGERS
    GROUPS: tl.constexpr = TILE // GROUP
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    slot = at * num_tiles + tile
    group_slots = slot * GROUPS + tl.arange(0, GROUPS)
    x = tl.load(logits + at * logits_stride + ids, mask=inside, other=-float("inf")).to(tl.float32)

    asked = tl.load(integers + NUM_LOGPROBS)
    if asked >= 0:
        most = tl.max(x, axis=0)
        origin = tl.where(most == -float("inf"), 0.0, most)
        tl.store(raw_best + slot, most)
        tl.store(raw_mass + slot, tl.sum(tl.exp2((x - origin) * LOG2_E), axis=0))
        if asked > 0:
            tl.store(raw_group_best + group_slots, tl.max(tl.reshape(x, (GROUPS, GROUP)), axis=1))

    # Penalties
    r, p, f, has_penalties = penalties_of(numbers)
    if has_penalties:
        count = tl.load(counts + row * vocab + ids, mask=inside, other=0)
        x = tl.where(count != 0, _penalised(x, count, r, p, f), x)
        if ranks is not None:
            # Drafts count, too: few tokens, one by one, so that they take no registers of rows without.
            num_drafts = tl.load(ranks + at) - 1
            for number in range(0, num_drafts):
                draft = tl.load(step_tokens + at - number)
                count_of_draft = tl.load(counts + row * vocab + draft)
                for other in range(0, num_drafts):
                    count_of_draft += (tl.load(step_tokens + at - other) == draft).to(tl.int32)
                raw = tl.load(logits + at * logits_stride + draft).to(tl.float32)
                x = tl.where(ids == draft, _penalised(raw, count_of_draft, r, p, f), x)

    restricted = tl.load(integers + _IS_MASKED) != 0

    num_biased, num_banned = tl.load(integers + _NUM_BIASES), tl.load(integers + _NUM_STOPS)
    num_banned = tl.where(tl.load(positions + at) < tl.load(integers + _MIN_POSITION), num_banned, 0)
    has_few = num_biased + num_banned > 0
    changes = has_penalties | restricted | has_few
    if tile == 0:
        tl.store(is_changed + at, changes.to(tl.int32))
    if changes:
        if restricted:
            mask_row = row
            if ranks is not None:
                mask_row = tl.where(tl.load(ranks + at) > 1, max_rows + at, row)
            words = tl.load(token_masks + mask_row * num_words + ids // 32, mask=inside, other=0)
            x = tl.where((words >> (ids % 32)) & 1 != 0, x, -float("inf"))
        target = adjusted + at * vocab
        tl.store(target + ids, x, mask=inside)
        if has_few:
            # Biases and bans: few tokens, anywhere in the vocabulary, so they are applied in memory.
            first, end = tile * TILE, tl.minimum(tile * TILE + TILE, vocab)
            biases, stops = tl.arange(0, BIASES), tl.arange(0, STOPS)
            biased = tl.load(bias_ids + row * max_biases + biases, mask=biases < num_biased, other=-1)
            banned = tl.load(stop_ids + row * max_stops + stops, mask=stops < num_banned, other=-1)
            is_biased = (biased >= first) & (biased < end)
            is_banned = (banned >= first) & (banned < end)
            if (tl.max(is_biased.to(tl.int32), axis=0) + tl.max(is_banned.to(tl.int32), axis=0)) > 0:
                tl.debug_barrier()
                was = tl.load(target + biased, mask=is_biased, other=0.0)
                added = tl.load(bias + row * max_biases + biases, mask=is_biased, other=0.0)
                tl.store(target + biased, was + added, mask=is_biased)
                tl.debug_barrier()
                tl.store(target + banned, -float("inf"), mask=is_banned)
                tl.debug_barrier()
                x = tl.load(target + ids, mask=inside, other=-float("inf"))

    # NaN counts as +inf: either in any tile makes the row broken.
    best, token = tl.max(tl.where(x != x, float("inf"), x), axis=0, return_indices=True)
    tl.store(tile_best + slot, best)
    draws, is_topped, is_limited = draws_of(numbers, integers, vocab)
    if draws:
        t = tl.load(numbers + TEMPERATURE)
        below = distance(x, tl.where(best == -float("inf"), 0.0, best), t)
        if is_limited:
            tl.store(group_best + group_slots, tl.max(tl.reshape(x, (GROUPS, GROUP)), axis=1))
            if not is_topped:
                tl.store(tile_mass + slot, tl.sum(tl.exp2(-below * LOG2_E), axis=0))
            if tl.load(numbers + TOP_N_SIGMA) > 0:
                count, mean, spread = _moments_of(below)
                first_moment = moments + 3 * at * num_tiles + tile
                tl.store(first_moment, count)
                tl.store(first_moment + num_tiles, mean)
                tl.store(first_moment + 2 * num_tiles, spread)
        else:
            key = noise_of(integers, tl.load(positions + at))
            score, token = tl.max(gumbel(key, ids) - below, axis=0, return_indices=True)
            tl.store(tile_score + slot, score)
    tl.store(tile_token + slot, tile * TILE + token)
