"""Matrices in the formats of quantized safetensors files, written one value at a time, and what they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Of each format: the quantization_config of config.json, and the tensor that holds the codes.
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "awq": ({"quant_method": "awq", "bits": 4}, "qweight"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, "qweight"),
    "packed": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "weight_packed"),
    "int8": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "weight"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight"),
}


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


def random_matrix(form: str, module: str, out_size: int, in_size: int) -> dict[str, Tensor]:
    """A matrix [out, in] of random codes in one of FORMATS; groups have 64 inputs, and values a deviation of 0.05."""
    codes, zeros = torch.randint(0, 16, (out_size, in_size)), torch.full((out_size, in_size // 64), 8)
    scales = torch.full((in_size // 64, out_size), 0.011, dtype=torch.float16)
    match form:
        case "awq":
            found = {"qweight": pack_words(codes.T, 4, 1, AWQ_ORDER), "qzeros": pack_words(zeros.T, 4, 1, AWQ_ORDER)}
            found["scales"] = scales
        case "gptq":
            found = {"qweight": pack_words(codes.T, 4, 0), "qzeros": pack_words(zeros.T - 1, 4, 1), "scales": scales}
        case "packed":
            return packed_in_4_bits(f"{module}.weight", torch.randn(out_size, in_size) / 20, 64)
        case "int8":
            values = torch.randint(-127, 128, (out_size, in_size)).to(torch.int8)
            found = {"weight": values, "weight_scale": torch.full((out_size, 1), 0.0007)}
        case _:
            found = {"weight": torch.randn(out_size, in_size).to(torch.float8_e4m3fn)}
            found["weight_scale_inv"] = torch.full((-(-out_size // 64), in_size // 64), 0.05)
    return {f"{module}.{name}": tensor for name, tensor in found.items()}
