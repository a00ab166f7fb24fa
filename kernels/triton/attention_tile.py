"""Attention to one tile of keys with a running softmax (FlashAttention; Dao et al., 2022), for decodes and chunks.

Exponents have base 2, for which the hardware has an instruction: scores are multiplied by log2(e) / sqrt(head_dim).
With float8 pages, a key's scale multiplies its column of scores and a value's scale its column of weights, so that no
dequantized copy is made. All arithmetic is in float32, except the operands of matrix products.
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
def score_tile(q, token, is_key, keys_ptr, key_scales_ptr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """The products of queries and keys, [rows, tokens] float32. The caller masks those that a query does not see.

    q       [rows, DIM], in the dtype of the products
    token   [tokens], from find_tokens
    is_key  [tokens] bool, which tokens belong to the sequence
    """
    keys = load_tile(keys_ptr, token, is_key, HEAD_DIM, DIM).to(q.dtype)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if key_scales_ptr is not None:
        scores *= tl.load(key_scales_ptr + token, mask=is_key, other=0.0)[None, :]
    return scores


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
