"""What decodes and chunks share: a tile of keys taken into a running softmax (FlashAttention; Dao et al., 2022).

Exponents are of base 2, for which the hardware has an instruction: scores are multiplied by log2(e) / sqrt(head_dim).
Where pages hold float8, a key's scale multiplies its column of scores and a value's scale its column of weights: no
dequantised copy is made. All arithmetic but the operands of the products is in float32.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

# How many sequences a program looks at together when it searches for the one whose work is its own.
SEQS = tl.constexpr(256)
# Arrays of a step may begin anywhere in a larger one: kernels are not compiled again for that.
METADATA = ("query_start_ptr", "context_len_ptr", "block_table_ptr", "rows_ptr")


def score_scale(head_dim: int) -> float:
    """What turns a product of a query and a key into an exponent of base 2."""
    return math.log2(math.e) / math.sqrt(head_dim)


def tile_dim(head_dim: int) -> int:
    """Columns of a tile: a power of two, and enough for a matrix instruction."""
    return max(16, int(triton.next_power_of_2(head_dim)))


@triton.jit
def table_row(block_table_ptr, rows_ptr, table_stride, seq):
    """Where the block table's row of a sequence begins."""
    row = seq
    if rows_ptr is not None:
        row = tl.load(rows_ptr + seq)
    return block_table_ptr + row.to(tl.int64) * table_stride


@triton.jit
def load_where(places, mask):
    """Zero where the mask says no; None: there is no mask."""
    if mask is None:
        return tl.load(places)
    else:
        return tl.load(places, mask=mask, other=0.0)


@triton.jit
def find_tokens(table_ptr, position, is_key, kv_head, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr):
    """Which row of the pages, seen as [slots * KV_HEADS, head_dim], each token's key and value are; 64 bits."""
    block = load_where(table_ptr + position // BLOCK_SIZE, is_key)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    return slot * KV_HEADS + kv_head


@triton.jit
def load_tile(pages_ptr, token, is_key, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """[tokens, DIM]. What is no key of the sequence is not read: it may be NaN, which no weight of zero would hide."""
    dim = tl.arange(0, DIM)[None, :]
    places = pages_ptr + token[:, None] * HEAD_DIM + dim
    mask = None
    if is_key is not None:
        mask = is_key[:, None]
    if HEAD_DIM < DIM:
        mask = dim < HEAD_DIM if mask is None else mask & (dim < HEAD_DIM)
    return load_where(places, mask)


@triton.jit
def attend_tile(
    q,
    attended,
    top,
    total,
    token,
    is_key,
    seen,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Takes a tile of keys and values into the running softmax.

    q         [rows, DIM], in the dtype of the products
    attended  [rows, DIM] float32, weighted sum of values; top, total [rows] float32, greatest exponent, sum of weights
    token     [tokens], of find_tokens
    is_key    [tokens] bool, which are of the sequence; None: all
    seen      broadcasts to [rows, tokens] bool, which keys a query sees; None: all
    """
    keys = load_tile(keys_ptr, token, is_key, HEAD_DIM, DIM).to(q.dtype)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if key_scales_ptr is not None:
        scores *= load_where(key_scales_ptr + token, is_key)[None, :]
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    # A row that has seen nothing yet: -inf minus -inf would be NaN. A NaN that it has seen stays in the sums.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, axis=1)
    if value_scales_ptr is not None:
        weights *= load_where(value_scales_ptr + token, is_key)[None, :]
    values = load_tile(values_ptr, token, is_key, HEAD_DIM, DIM).to(q.dtype)
    attended = tl.dot(weights.to(q.dtype), values, attended * fade[:, None], input_precision="ieee")
    return attended, new_top, total
