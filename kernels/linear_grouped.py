"""Matrix products of weights in groups, as checkpoints hold them, and 8-bit activations.

Weights are not rounded a second time. Activations are quantized as in `linear_int8`. With x = s * a + l in a group of
activations, and w = d * v + m in each of its groups of weights:

    sum of x * w  =  s * (sum over groups of weights of d * (sum of v * a) + m * (sum of a))  +  l * (sum of w)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .activate import Activation, activate
from .grouped_weight import INT4, GroupedFormat, GroupedWeight
from .linear import PLAIN, Linear, NativeLinear, Use
from .linear_int8 import GROUP, linear_int8, linear_int8_native, quantize_rows
from .native_module import native


@dataclass(frozen=True, slots=True)
class _Grouped:
    weight: GroupedWeight
    bias: Tensor | None
    activation: Activation | None

    def __call__(self, x: Tensor, /) -> Tensor:
        rows, scales, least = quantize_rows(activate(x.float(), self.activation) if self.activation else x)
        size = self.weight.format.group
        parts = GROUP // size
        missing = -self.weight.values.shape[1] % parts  # groups of weights in the last group of activations
        rows = rows.unflatten(2, (parts, -1)).double()
        values = self.weight.whole_values()
        values = functional.pad(values, (0, 0, 0, missing)).unflatten(1, (-1, parts)).double()
        weight_scales = functional.pad(self.weight.scales.float(), (0, missing)).unflatten(1, (-1, parts))
        minimums = torch.zeros_like(weight_scales)
        if self.weight.minimums is not None:
            minimums = functional.pad(self.weight.minimums.float(), (0, missing)).unflatten(1, (-1, parts))
        product = torch.zeros(len(x), len(values))
        for group in range(scales.shape[1]):
            scaled, total = torch.zeros_like(product), torch.zeros(len(values))
            for i in range(parts):
                part, weights = rows[:, group, i], values[:, group, i]
                d, m = weight_scales[:, group, i], minimums[:, group, i]
                scaled += (part @ weights.T).float() * d + part.sum(dim=-1, keepdim=True).float() * m  # exact sums
                total += weights.sum(dim=-1).float() * d + size * m
            product += scaled * scales[:, group, None] + least[:, group, None] * total
        if self.bias is not None:
            product += self.bias.float()
        return product.to(x.dtype)


def linear_grouped(weight: Tensor | GroupedWeight, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    """`linear` with a weight in groups: sums within a group are exact, and groups are added in float32.

    A weight that the checkpoint does not hold in groups is multiplied by `linear_int8`.
    """
    if isinstance(weight, GroupedWeight):
        return _Grouped(weight, bias, use.activation)
    return linear_int8(weight, bias, use)


def multiplies_all(form: GroupedFormat) -> bool:
    """Whether `linear_grouped` multiplies a format: it does all."""
    return True


def multiplies_native(form: GroupedFormat) -> bool:
    """Whether `linear_grouped_native` multiplies a format."""
    return form == INT4


def linear_grouped_native(weight: Tensor | GroupedWeight, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    if not isinstance(weight, GroupedWeight):
        return linear_int8_native(weight, bias, use)
    assert native is not None
    assert weight.minimums is not None
    out_size, in_size = weight.shape
    parts = weight.values, weight.scales, weight.minimums
    assert all(part.is_contiguous() for part in parts)
    packed = torch.empty(native.int4_bytes(in_size, out_size), dtype=torch.uint8)
    native.pack_int4(*(part.data_ptr() for part in parts), packed.data_ptr(), in_size, out_size)
    return NativeLinear(in_size, out_size, (packed,), bias, use, native.linear_int4)
