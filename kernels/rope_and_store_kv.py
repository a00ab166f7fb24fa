"""Rotary position embedding of queries and keys, and the write of keys and values to their pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .native_module import DTYPES, address, native, takes
from .paged import GREATEST, PagedKV, is_int8
from .recording import empty
from .rms_norm import rms_norm, rms_norm_cpu


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The weights by which `rms_norm` normalizes queries and keys before they are rotated, in the dtype of the heads.

    query  [head_dim] to normalize each head, or [num_heads * head_dim] to normalize all heads of a token at once;
           None: queries are left as they are
    key    [head_dim] or [num_kv_heads * head_dim], likewise
    """

    query: Tensor | None
    key: Tensor
    eps: float

    def apply(self, qkv: Tensor, num_kv_heads: int, rms_norm: Callable[..., Tensor]) -> Tensor:
        """Return a copy of `rope_and_store_kv`'s `qkv` with normalized queries and keys."""
        queries, keys, values = qkv.tensor_split((-2 * num_kv_heads, -num_kv_heads), dim=1)
        parts = [
            heads
            if weight is None
            else rms_norm(heads.reshape(len(qkv), -1, len(weight)), weight, self.eps).view(heads.shape)
            for heads, weight in ((queries, self.query), (keys, self.key))
        ]
        return torch.cat((*parts, values), dim=1)


def rope_and_store_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    kv: PagedKV,
    norms: HeadNorms | None = None,
    positions: Tensor | None = None,
    centre: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys (RoPE; Su et al., 2021), store keys and values, and return the queries.

    qkv        [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, then keys, then values; not changed
    cos, sin   [num_tokens, head_dim / 2] float32, of the tokens' positions; or tables of all positions
    slots      [num_tokens] int64, where each token's key and value go; -1: nowhere (a row that pads the batch)
    kv         written in place; pages in 8 bits with the scales of `quantize_heads`
    norms      None: heads are not normalized
    positions  [num_tokens] int64, the tokens' rows of the tables; None: row i is of token i
    centre     [num_kv_heads, head_dim] float32, contiguous, about what rotated keys have in common; None: nothing
    return     [num_tokens, num_heads, head_dim], qkv's dtype

    Dimension i is paired with i + head_dim / 2, as in Hugging Face's checkpoints. Rotation is in float32.

    A few dimensions of a key may be a hundred times as large as the others, whose values would be lost in 8 bits. So
    pages in 8 bits hold keys less their centre, which adds the same number to all scores of a query: a softmax without
    caps and sinks is the same. Then `mix` spreads what is left over the dimensions of queries and keys, whose products
    stay what they are (QuaRot; Ashkboos et al., 2024).
    """
    if norms is not None:
        qkv = norms.apply(qkv, kv.num_kv_heads, rms_norm)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    half = kv.head_dim // 2
    rotated = qkv[:, : -kv.num_kv_heads].float()
    first, second = rotated[..., :half], rotated[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return _store(rotated, qkv, slots, kv, centre)


def rope_and_store_kv_cpu(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    kv: PagedKV,
    norms: HeadNorms | None = None,
    positions: Tensor | None = None,
    centre: Tensor | None = None,
) -> Tensor:
    """`rope_and_store_kv` in fewer passes: a roll swaps the halves, and the sines carry their signs."""
    if norms is not None:
        qkv = norms.apply(qkv, kv.num_kv_heads, rms_norm_cpu)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    half = kv.head_dim // 2
    wide = qkv[:, : -kv.num_kv_heads].float()
    cos, sin = torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
    rotated = torch.addcmul(wide * cos, wide.roll(half, dims=-1), sin)
    return _store(rotated, qkv, slots, kv, centre)


def rope_and_store_kv_native(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    kv: PagedKV,
    norms: HeadNorms | None = None,
    positions: Tensor | None = None,
    centre: Tensor | None = None,
) -> Tensor:
    """`rope_and_store_kv` in one pass, after one for norms; keys and values go directly to their slots."""
    if native is None or not takes(qkv) or (kv.key_scales is not None and not is_int8(kv)):
        return rope_and_store_kv_cpu(qkv, cos, sin, slots, kv, norms, positions, centre)
    if norms is not None:
        qkv = _normalise_native(qkv, kv, norms)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * kv.num_kv_heads
    queries = empty(num_tokens, num_heads, kv.head_dim, dtype=qkv.dtype)
    native.rope_and_store_kv(
        DTYPES[qkv.dtype],
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        kv.keys.data_ptr(),
        kv.values.data_ptr(),
        address(kv.key_scales),
        address(kv.value_scales),
        address(centre),
        queries.data_ptr(),
        num_tokens,
        num_heads,
        kv.num_kv_heads,
        kv.head_dim,
    )
    return queries


def quantize_heads(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round to a dtype of GREATEST, with a scale for each head: x = scale * value.

    x       [..., head_dim] floating point
    return  [..., head_dim] of the dtype; [...] float32 scales, 1 for a head of zeros

    A head that holds NaN or infinity has NaN in what its scale multiplies: in int8 its scale is not finite.
    """
    wide = x.float()
    scales = wide.abs().amax(dim=-1) / GREATEST[dtype]
    scales = torch.where(scales == 0, 1.0, scales)
    values = wide / scales[..., None]
    if dtype == torch.int8:  # the scale of a head near the least float may be so inexact that a value exceeds 127
        values = values.round().clamp(-GREATEST[dtype], GREATEST[dtype])
        values = torch.where(scales[..., None].isfinite(), values, 0.0)
    return values.to(dtype), scales


def mix(x: Tensor) -> Tensor:
    """Multiply heads by an orthogonal matrix of ±1 / √n, so that no dimension of the result stands out.

    x       [..., head_dim] float32
    return  likewise

    It is a Walsh–Hadamard transform of pairs of dimensions, and of as many neighbours in each half of a head as the
    greatest power of two that divides head_dim / 2.
    """
    return x @ _mixing(x.shape[-1]).to(x.device)


@lru_cache
def _mixing(head_dim: int) -> Tensor:
    half = head_dim // 2
    width = half & -half
    neighbours = torch.ones(1, 1)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(neighbours) < width:
        neighbours = torch.kron(step, neighbours)
    return torch.kron(step, torch.block_diag(*[neighbours] * (half // width))) / math.sqrt(2 * width)


def _normalise_native(qkv: Tensor, kv: PagedKV, norms: HeadNorms) -> Tensor:
    assert native is not None
    out = empty(*qkv.shape, dtype=qkv.dtype)
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * kv.num_kv_heads
    query_size = 0 if norms.query is None else len(norms.query)
    addresses = qkv.data_ptr(), address(norms.query), norms.key.data_ptr(), out.data_ptr()
    sizes = num_tokens, num_heads, kv.num_kv_heads, kv.head_dim, query_size, len(norms.key)
    native.head_norms(DTYPES[qkv.dtype], *addresses, *sizes, norms.eps)
    return out


def _store(rotated: Tensor, qkv: Tensor, slots: Tensor, kv: PagedKV, centre: Tensor | None) -> Tensor:
    """Store keys and values, and return the queries; `rotated` has queries and keys in float32."""
    keys, values = rotated[:, -kv.num_kv_heads :], qkv[:, -kv.num_kv_heads :]
    queries = rotated[:, : -kv.num_kv_heads]
    if kv.key_scales is not None:
        queries, keys = mix(queries), mix(keys if centre is None else keys - centre)
    else:
        keys = keys.to(qkv.dtype)
    if bool((slots < 0).any()):
        kept = slots >= 0
        keys, values, slots = keys[kept], values[kept], slots[kept]
    _store_heads(keys, slots, kv.keys, kv.key_scales)
    _store_heads(values, slots, kv.values, kv.value_scales)
    return queries.to(qkv.dtype)


def _store_heads(heads: Tensor, slots: Tensor, pages: Tensor, scales: Tensor | None) -> None:
    if scales is not None:
        heads, head_scales = quantize_heads(heads, pages.dtype)
        scales.flatten(0, 1).index_copy_(0, slots, head_scales)
        heads, pages = heads.view(torch.uint8), pages.view(torch.uint8)  # float8 cannot be indexed
    pages.flatten(0, 1).index_copy_(0, slots, heads)
