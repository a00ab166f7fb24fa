"""Attention to one tile of keys with a running softmax (FlashAttention; Dao et al., 2022), for decodes and chunks.

Exponents have base 2, for which the hardware has an instruction: scores are multiplied by log2(e) / sqrt(head_dim).
With pages in 8 bits, a key's scale multiplies its column of scores and a value's scale its column of weights, so that
no dequantized copy is made. All arithmetic is in float32, except the operands of matrix products.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

# How many sequences a program examines at once when it searches for the one to work on.
SEQS = tl.constexpr(256)
# A step's arrays may begin anywhere in a larger one; kernels must not be compiled again for another alignment.
METADATA = ("query_start_ptr", "context_len_ptr", "block_table_ptr", "rows_ptr", "arrivals_ptr")


def score_scale(head_dim: int) -> float:
    """The factor that turns the product of a query and a key into an exponent of base 2."""
    return math.log2(math.e) / math.sqrt(head_dim)


def score_cap(softcap: float, head_dim: int) -> float:
    """The cap of such products, whose scores `softcap` caps."""
    return softcap * math.sqrt(head_dim)


def tile_dim(head_dim: int) -> int:
    """The number of columns of a tile: a power of two, large enough for a matrix instruction."""
    return max(16, int(triton.next_power_of_2(head_dim)))


@triton.jit
def table_row(block_table_ptr, rows_ptr, table_stride, seq):
    """A pointer to the start of a sequence's row of the block table."""
    row = seq
    if rows_ptr is not None:
        row = tl.load(rows_ptr + seq)
    return block_table_ptr + row.to(tl.int64) * table_stride


@triton.jit
def find_tokens(table_ptr, position, is_key, kv_head, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr):
    """The row of each token's key and value in the pages, viewed as [slots * KV_HEADS, head_dim]; 64 bits."""
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=is_key, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    return slot * KV_HEADS + kv_head


@triton.jit
def load_tile(pages_ptr, token, is_key, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Load [tokens, DIM]. Slots without a key are not read: NaN times a weight of zero would still be NaN."""
    dim = tl.arange(0, DIM)[None, :]
    mask = is_key[:, None]
    if HEAD_DIM < DIM:
        mask &= dim < HEAD_DIM
    return tl.load(pages_ptr + token[:, None] * HEAD_DIM + dim, mask=mask, other=0.0)


@triton.jit
def tanh(x):
    """To about as many digits as float32 has, near 0 too."""
    square = x * x
    far = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)  # loses digits near 0
    series = square * 0.021869488536155203 - 0.05396825396825397
    series = (series * square + 0.13333333333333333) * square - 0.3333333333333333
    return tl.where(square < 0.0625, x + x * square * series, far)


@triton.jit
def score_tile(
    q, token, is_key, keys_ptr, key_scales_ptr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, CAP: tl.constexpr
):
    """The products of queries and keys, [rows, tokens] float32. The caller masks those that a query does not see.

    q       [rows, DIM], in the dtype of the products
    token   [tokens], from find_tokens
    is_key  [tokens] bool, which tokens belong to the sequence
    CAP     the products' cap, from score_cap; 0: none
    """
    keys = load_tile(keys_ptr, token, is_key, HEAD_DIM, DIM).to(q.dtype)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if key_scales_ptr is not None:
        scores *= tl.load(key_scales_ptr + token, mask=is_key, other=0.0)[None, :]
    if CAP > 0:
        scores = tanh(scores * (1.0 / CAP)) * CAP
    return scores


@triton.jit
def add_sinks(total, top, head, is_head, sinks_ptr):
    """The sums of weights with the weight of each row's sink, if heads have sinks.

    total, top  [rows], from attend_tile
    head        [rows], the query head of each row

    A sink far above the greatest score makes the sum infinite, and what is divided by it 0.
    """
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=is_head, other=float("-inf"))
        shift = tl.where(top == float("-inf"), 0.0, top)
        total += tl.exp2(tl.fma(sink, tl.full(sink.shape, 1.4426950408889634, tl.float32), -shift))
    return total


@triton.jit
def attend_tile(
    scores,
    attended,
    top,
    total,
    token,
    is_key,
    values_ptr,
    value_scales_ptr,
    scale,
    DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Add a tile of scores and values to the running softmax.

    attended  [rows, DIM] float32, weighted sum of values
    top       [rows] float32, greatest exponent
    total     [rows] float32, sum of weights
    DTYPE     dtype of the products
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    # For a row that has seen no key yet, -inf minus -inf would be NaN. A NaN among its keys still reaches the sums.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, axis=1)
    if value_scales_ptr is not None:
        weights *= tl.load(value_scales_ptr + token, mask=is_key, other=0.0)[None, :]
    values = load_tile(values_ptr, token, is_key, HEAD_DIM, DIM).to(DTYPE)
    attended = tl.dot(weights.to(DTYPE), values, attended * fade[:, None], input_precision="ieee")
    return attended, new_top, total


@triton.jit
def find_tile(tile, query_start_ptr, first_seq, num_seqs, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """A tile's sequence, counted from `first_seq`, its first token and its number of tokens, and the tile's first row.

    A tile has ROWS rows of one sequence, queries times the GROUP heads of a KV head. A first row beyond the last one of
    the sequence means that there is no such tile.
    """
    # Sequence i's tiles start at (query_start[i] - query_start[0]) * GROUP // ROWS + i, which leaves room for all.
    origin = tl.load(query_start_ptr + first_seq)
    seq = -1
    for first in range(0, num_seqs, SEQS):
        lane = first + tl.arange(0, SEQS)
        query_start = tl.load(query_start_ptr + first_seq + lane, mask=lane < num_seqs, other=0)
        is_past = (lane < num_seqs) & ((query_start - origin) * GROUP // ROWS + lane <= tile)
        seq += tl.sum(is_past.to(tl.int32), axis=0)
    first_token = tl.load(query_start_ptr + first_seq + seq)
    num_tokens = tl.load(query_start_ptr + first_seq + seq + 1) - first_token
    first_row = (tile - (first_token - origin) * GROUP // ROWS - seq) * ROWS
    return seq, first_token, num_tokens, first_row


@triton.jit
def find_keys(
    first_row, context, num_tokens, GROUP: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """The positions in the sequence of each row's query, of the first row's and of the last row's, in a tile.

    Then the first and last key (exclusive) that some row sees.
    """
    first_token = context - num_tokens
    position = first_token + (first_row + tl.arange(0, ROWS)) // GROUP
    first_position = first_token + first_row // GROUP
    last_position = first_token + tl.minimum((first_row + ROWS - 1) // GROUP, num_tokens - 1)
    begin = 0
    end = tl.maximum(last_position + 1, 0)
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
    return position, first_position, last_position, begin, end


@triton.jit
def attend_keys(
    start, end, q, position, first_position, last_position, table_ptr, kv_head, keys_ptr, values_ptr, key_scales_ptr,
    value_scales_ptr, scale, attended, top, total, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """`attend_tile` to the keys from `start` on, of those before `end`, that each row sees.

    position  [rows], of each row's query in its sequence, from `first_position` to `last_position`
    """
    key = start + tl.arange(0, TILE)
    is_key = key < end
    if WINDOW:
        is_key &= key > first_position - WINDOW
    token = find_tokens(table_ptr, key, is_key, kv_head, BLOCK_SIZE, KV_HEADS)
    scores = score_tile(q, token, is_key, keys_ptr, key_scales_ptr, HEAD_DIM, DIM, CAP)
    if start + TILE > first_position + 1:
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    if WINDOW:  # noqa: SIM102  this condition is known at compile time, the other is not
        if start <= last_position - WINDOW:
            scores = tl.where(key[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
    return attend_tile(
        scores, attended, top, total, token, is_key, values_ptr, value_scales_ptr, scale, q.dtype, HEAD_DIM, DIM
    )
