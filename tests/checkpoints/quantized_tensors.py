"""Matrices in the formats of quantized safetensors files, written one value at a time, and what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_words(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of codes along a dimension; `order` says which code comes where in a word."""
    per_word = 32 // bits
    codes = codes.long().movedim(dim, -1).unflatten(-1, (-1, per_word))
    word = torch.zeros(codes.shape[:-1], dtype=torch.int64)
    for position, code in enumerate(order or range(per_word)):
        word |= codes[..., code] << bits * position
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32).movedim(-1, dim).contiguous()


def packed_in_4_bits(name: str, weight: Tensor, group: int = 32) -> dict[str, Tensor]:
    """A weight [out, in] in compressed-tensors' pack-quantized format, symmetric."""
    groups = weight.unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / 7).clamp_min(1e-6).to(torch.bfloat16)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1) + 8
    return {
        f"{name}_packed": pack_words(codes, 4, 1),
        f"{name}_scale": scales,
        f"{name}_shape": torch.tensor(weight.shape),
    }
