"""Norms of heads, rotary embedding and the write to the pages on a GPU; a program handles several heads of a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..paged import GREATEST, PagedKV
from ..rope_and_store_kv import HeadNorms
from .configs import IS_INTERPRETED, tuned
from .dependent_launch import await_previous, dependent_launch
from .rms_norm import rms_norm_triton


@dataclass(frozen=True, slots=True)
class Config:
    heads: int
    num_warps: int


def default_config(head_dim: int) -> Config:
    """About 1024 dimensions a program, and eight of each half a thread, so that loads have 16 bytes."""
    block = triton.next_power_of_2(head_dim)
    heads = max(1024 // block, 1)
    return Config(heads=heads, num_warps=max(heads * block // 512, 1))


def rope_and_store_kv_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    kv: PagedKV,
    norms: HeadNorms | None = None,
    positions: Tensor | None = None,
    centre: Tensor | None = None,
) -> Tensor:
    """`rope_and_store_kv` in one pass, after another for norms over all heads at once. Pages must be contiguous."""
    weights = () if norms is None else (norms.query, norms.key)
    if norms is not None and any(weight is not None and len(weight) != kv.head_dim for weight in weights):
        qkv, norms = norms.apply(qkv, kv.num_kv_heads, rms_norm_triton), None
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * kv.num_kv_heads
    queries = torch.empty(num_tokens, num_heads, kv.head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        config = tuned("rope_and_store_kv", f"{num_heads}+{kv.num_kv_heads}x{kv.head_dim}", default_config(kv.head_dim))
        blocks = triton.cdiv(num_heads, config.heads) + 2 * triton.cdiv(kv.num_kv_heads, config.heads)
        _rope_and_store_kv[(num_tokens, blocks)](
            qkv.contiguous(),
            cos.contiguous(),
            sin.contiguous(),
            positions,
            slots,
            queries,
            kv.keys,
            kv.values,
            kv.key_scales,
            kv.value_scales,
            None if kv.key_scales is None else centre,
            None if norms is None else norms.query,
            None if norms is None else norms.key,
            0.0 if norms is None else norms.eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=kv.num_kv_heads,
            HEAD_DIM=kv.head_dim,
            BLOCK=triton.next_power_of_2(kv.head_dim // 2),
            MIXES=(kv.head_dim // 2 & -(kv.head_dim // 2)).bit_length(),
            HEADS=config.heads,
            GREATEST=GREATEST.get(kv.dtype, 0.0),
            IS_INTERPRETED=IS_INTERPRETED,
            num_warps=config.num_warps,
            **dependent_launch(),
        )
    return queries


@triton.jit
def _rope_and_store_kv(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    queries_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    centre_ptr,
    query_norm_ptr,
    key_norm_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MIXES: tl.constexpr,
    HEADS: tl.constexpr,
    GREATEST: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    QUERY_BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    IS_INT8: tl.constexpr = keys_ptr.dtype.element_ty == tl.int8
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = token * (NUM_HEADS + 2 * NUM_KV_HEADS)
    dim = tl.arange(0, BLOCK)[None, :]
    if block < QUERY_BLOCKS:
        head = (block * HEADS + tl.arange(0, HEADS))[:, None]
        inside = head < NUM_HEADS
        first, second = _load(qkv_ptr, row + head, inside, dim, HEAD_DIM)
        first, second = _normalise(first, second, query_norm_ptr, dim, eps, dtype, HEAD_DIM)
        first, second = _rotate(first, second, cos_ptr, sin_ptr, positions_ptr, token, dim, HEAD_DIM)
        if key_scales_ptr is not None:
            first, second = _mix(first, second, HEADS, BLOCK, MIXES)
        _store(queries_ptr, token * NUM_HEADS + head, inside, dim, first, second, HEAD_DIM)
    else:
        slot = tl.load(slots_ptr + token)
        head = ((block - QUERY_BLOCKS) % KV_BLOCKS * HEADS + tl.arange(0, HEADS))[:, None]
        inside = head < NUM_KV_HEADS
        place = slot * NUM_KV_HEADS + head
        is_stored = head < tl.where(slot < 0, 0, NUM_KV_HEADS)
        if block < QUERY_BLOCKS + KV_BLOCKS:
            first, second = _load(qkv_ptr, row + NUM_HEADS + head, inside, dim, HEAD_DIM)
            first, second = _normalise(first, second, key_norm_ptr, dim, eps, dtype, HEAD_DIM)
            first, second = _rotate(first, second, cos_ptr, sin_ptr, positions_ptr, token, dim, HEAD_DIM)
            if key_scales_ptr is not None:
                if centre_ptr is not None:
                    first_centre, second_centre = _load(centre_ptr, head, inside, dim, HEAD_DIM)
                    first, second = first - first_centre, second - second_centre
                first, second = _mix(first, second, HEADS, BLOCK, MIXES)
                first, second = _quantize(
                    first, second, key_scales_ptr + place, is_stored, GREATEST, IS_INT8, IS_INTERPRETED
                )
            _store(keys_ptr, place, is_stored, dim, first, second, HEAD_DIM)
        else:
            first, second = _load(qkv_ptr, row + NUM_HEADS + NUM_KV_HEADS + head, inside, dim, HEAD_DIM)
            if value_scales_ptr is not None:
                first, second = _quantize(
                    first, second, value_scales_ptr + place, is_stored, GREATEST, IS_INT8, IS_INTERPRETED
                )
            _store(values_ptr, place, is_stored, dim, first, second, HEAD_DIM)


@triton.jit
def _load(ptr, head, inside, dim, HEAD_DIM: tl.constexpr):
    """Load both halves of heads, in float32."""
    inside = inside & (dim < HEAD_DIM // 2)
    places = ptr + head * HEAD_DIM + dim
    first = tl.load(places, mask=inside, other=0.0)
    second = tl.load(places + HEAD_DIM // 2, mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _normalise(first, second, weight_ptr, dim, eps, dtype: tl.constexpr, HEAD_DIM: tl.constexpr):
    if weight_ptr is not None:
        inside = dim < HEAD_DIM // 2
        first_weight = tl.load(weight_ptr + dim, mask=inside, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HEAD_DIM // 2 + dim, mask=inside, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        # Rounded where `rms_norm` rounds.
        first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _rotate(first, second, cos_ptr, sin_ptr, positions_ptr, token, dim, HEAD_DIM: tl.constexpr):
    turn = token
    if positions_ptr is not None:
        turn = tl.load(positions_ptr + token)
    places = turn * (HEAD_DIM // 2) + dim
    cos = tl.load(cos_ptr + places, mask=dim < HEAD_DIM // 2, other=0.0)
    sin = tl.load(sin_ptr + places, mask=dim < HEAD_DIM // 2, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _mix(first, second, HEADS: tl.constexpr, BLOCK: tl.constexpr, MIXES: tl.constexpr):
    """`mix` of the halves of heads, each [HEADS, BLOCK], in MIXES steps: of the halves, then of neighbours."""
    x = tl.join(first + second, first - second)
    for step in tl.static_range(1, MIXES):
        pairs = tl.permute(tl.reshape(x, (HEADS, BLOCK >> step, 2, 1 << step)), (0, 1, 3, 2))
        one, two = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(one + two, one - two), (0, 1, 3, 2)), (HEADS, BLOCK, 2))
    first, second = tl.split(x)
    scale: tl.constexpr = 2.0 ** (-0.5 * MIXES)
    return first * scale, second * scale


@triton.jit
def _quantize(
    first, second, scale_ptr, is_stored, GREATEST: tl.constexpr, IS_INT8: tl.constexpr, IS_INTERPRETED: tl.constexpr
):
    """`quantize_heads`: store the scales and return the values in float32."""
    greatest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1, keep_dims=True)
    greatest += tl.sum((first + second) * 0.0, axis=1, keep_dims=True)  # a maximum may leave NaN out
    scale = greatest / GREATEST
    scale = tl.where(scale == 0, 1.0, scale)
    tl.store(scale_ptr, scale, mask=is_stored)
    first, second = first / scale, second / scale
    if IS_INT8:
        first, second = _round_to_int8(first), _round_to_int8(second)
    elif IS_INTERPRETED:
        first, second = _round_to_float8(first), _round_to_float8(second)
    return first, second


@triton.jit
def _round_to_int8(x):
    """Round to whole numbers of int8's range, ties to even; NaN becomes 0."""
    whole = (x + 1.5 * 2**23) - 1.5 * 2**23
    return tl.where(x == x, tl.minimum(tl.maximum(whole, -127.0), 127.0), 0.0)


@triton.jit
def _round_to_float8(x):
    """Round to float8: the interpreter's own conversion loses the carry of a mantissa that rounds up."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # 2^exponent
    shift = tl.maximum(power, 2.0**-6) * (1.5 * 2**20)  # the last place of x + shift is that of x in float8
    return (x + shift) - shift


@triton.jit
def _store(ptr, head, inside, dim, first, second, HEAD_DIM: tl.constexpr):
    inside = inside & (dim < HEAD_DIM // 2)
    places = ptr + head * HEAD_DIM + dim
    tl.store(places, first.to(ptr.dtype.element_ty), mask=inside)
    tl.store(places + HEAD_DIM // 2, second.to(ptr.dtype.element_ty), mask=inside)
