"""Matrix products of quantized weights and unquantized activations, which read half the bytes of bfloat16 weights.

A weight in int8 or float8 has one scale for every output, applied at the end of the product. On the default model's
projections the error is 0.85 % of their norm in int8 and 2.6 % in float8. A scale for every 128 inputs would leave
0.69 % and 2.6 %, and would have to be loaded and applied all along the input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from .activate import Activation, activate
from .grouped_weight import GroupedWeight
from .linear import PANEL, PLAIN, Linear, NativeLinear, Use, linear
from .linear_int8 import PackedInt8, as_packed
from .native_module import native

FP8_MAX = 448.0  # of float8_e4m3fn
DEPTH = 32  # AMX's layout is padded to a multiple of this many inputs


def quantize_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to the nearest, ties to even: weight = scale * value.

    weight  [out, in] floating point
    return  [out, in] int8 in -127…127; [out] float32 scales, 1 for an output of zeros
    """
    values, scales = _scale_to(weight, 127)
    return values.round().to(torch.int8), scales


def quantize_to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to the nearest, ties to even: weight = scale * value.

    weight  [out, in] floating point
    return  [out, in] float8_e4m3fn; [out] float32 scales, 1 for an output of zeros
    """
    values, scales = _scale_to(weight, FP8_MAX)
    return values.to(torch.float8_e4m3fn), scales


def _scale_to(weight: Tensor, greatest: float) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / greatest
    scales = torch.where(scales == 0, 1.0, scales)
    return wide / scales[:, None], scales


@dataclass(frozen=True, slots=True)
class _Dequantized:
    """`linear`, summed in float32. `weight` makes the [out, in] float32 that it multiplies by."""

    weight: Callable[[], Tensor]
    bias: Tensor | None
    activation: Activation | None

    def __call__(self, x: Tensor, /) -> Tensor:
        x = activate(x, self.activation) if self.activation else x
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.weight(), bias).to(x.dtype)


def _restored(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales[:, None]


def linear_int8_weight(weight: Tensor, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    """`linear` with a weight in int8, summed in float32."""
    return _Dequantized(partial(_restored, *quantize_to_int8(weight)), bias, use.activation)


def linear_fp8_weight(weight: Tensor | GroupedWeight, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    """`linear` with a weight in float8, summed in float32. One that the checkpoint has in float8 keeps its values."""
    if isinstance(weight, Tensor):
        return _Dequantized(partial(_restored, *quantize_to_fp8(weight)), bias, use.activation)
    return _Dequantized(weight.dequantize, bias, use.activation)


def linear_grouped_weight(weight: Tensor | GroupedWeight, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    """`linear` with a weight in groups as the checkpoint has it, summed in float32; any other weight as it is."""
    if isinstance(weight, Tensor):
        return linear(weight, bias, use)
    return _Dequantized(weight.dequantize, bias, use.activation)


def has_native_int8_weight() -> bool:
    """Whether `linear_int8_weight_native` can run: it needs a processor and a system with AMX for bfloat16."""
    return native is not None and native.instruction_set() == "amx"


def packed_int8_weight(out_size: int, in_size: int) -> PackedInt8:
    """The weight of `linear_int8_weight_native`, which has a scale for every output."""
    assert native is not None
    outputs, depth = -(-out_size // PANEL) * PANEL, -(-in_size // DEPTH) * DEPTH
    return PackedInt8(
        (out_size, in_size),
        torch.empty(outputs, depth, dtype=torch.int8),
        torch.empty(outputs, 1),
        native.pack_int8_weight,
        native.pack_int8_weight_blocks,
    )


def linear_int8_weight_native(weight: Tensor | PackedInt8, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    """`linear_int8_weight` by the matrix unit of AMX: activations are rounded to bfloat16, sums are float32.

    Activations are rounded once. A product has x's dtype, a head's too.
    """
    assert native is not None
    packed = as_packed(weight, packed_int8_weight)
    parts = packed.values, packed.scales
    return NativeLinear(*packed.shape[::-1], parts, bias, Use(use.activation), native.linear_int8_weight)
