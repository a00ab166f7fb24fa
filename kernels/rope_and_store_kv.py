"""Rotary position embedding of queries and keys, and the write of keys and values to their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.native_module import DTYPES, native, takes
from kernels.paged import PagedKV


def rope_and_store_kv(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: PagedKV) -> Tensor:
    """Rotates queries and keys (RoPE; Su et al., 2021), stores keys and values, returns the queries.

    qkv       [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, then keys, then values; not changed
    cos, sin  [num_tokens, head_dim / 2] float32, of the tokens' positions
    slots     [num_tokens] int64, where each token's key and value go; -1: nowhere (a row that only pads the batch)
    kv        written in place
    return    [num_tokens, num_heads, head_dim], qkv's dtype

    Dimension i is paired with i + head_dim / 2, as in the checkpoints of Hugging Face. Rotated in float32.
    """
    half = kv.head_dim // 2
    rotated = qkv[:, : -kv.num_kv_heads].float()
    first, second = rotated[..., :half], rotated[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    queries, keys = rotated[:, : -kv.num_kv_heads], rotated[:, -kv.num_kv_heads :]
    _store(keys, qkv[:, -kv.num_kv_heads :], slots, kv)
    return queries


def rope_and_store_kv_cpu(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: PagedKV) -> Tensor:
    """`rope_and_store_kv` in fewer passes: a roll swaps the halves, and their signs go into the sines."""
    half = kv.head_dim // 2
    wide = qkv[:, : -kv.num_kv_heads].float()
    cos, sin = torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
    rotated = torch.addcmul(wide * cos, wide.roll(half, dims=-1), sin).to(qkv.dtype)
    _store(rotated[:, -kv.num_kv_heads :], qkv[:, -kv.num_kv_heads :], slots, kv)
    return rotated[:, : -kv.num_kv_heads]


def rope_and_store_kv_native(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: PagedKV) -> Tensor:
    """`rope_and_store_kv` in one pass, keys and values straight to their slots."""
    if native is None or not takes(qkv):
        return rope_and_store_kv_cpu(qkv, cos, sin, slots, kv)
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * kv.num_kv_heads
    queries = torch.empty(num_tokens, num_heads, kv.head_dim, dtype=qkv.dtype)
    native.rope_and_store_kv(
        DTYPES[qkv.dtype],
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        kv.keys.data_ptr(),
        kv.values.data_ptr(),
        queries.data_ptr(),
        num_tokens,
        num_heads,
        kv.num_kv_heads,
        kv.head_dim,
    )
    return queries


def _store(keys: Tensor, values: Tensor, slots: Tensor, kv: PagedKV) -> None:
    if bool((slots < 0).any()):
        kept = slots >= 0
        keys, values, slots = keys[kept], values[kept], slots[kept]
    kv.keys.flatten(0, 1).index_copy_(0, slots, keys)
    kv.values.flatten(0, 1).index_copy_(0, slots, values)
