"""Matrix products of weights in groups, as checkpoints hold them, and 8-bit activations.

Weights are not rounded a second time. Activations are quantized as in `linear_int8`. With x = s * a + l in a group of
activations, and w = d * v + m in each of its groups of weights:

    sum of x * w  =  s * (sum over groups of weights of d * (sum of v * a) + m * (sum of a))  +  l * (sum of w)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from .activate import Activation, activate
from .grouped_weight import INT4, GroupedFormat, GroupedWeight
from .linear import PLAIN, Linear, NativeLinear, Use
from .linear_int8 import GROUP, PackedInt8, linear_int8, linear_int8_native, quantize_rows
from .native_module import DTYPES, native


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


# Their order is that of Grouped in native/ops.h. A table that counts from -8 needs no look-up, and one of values from
# -16 to 16 is faster than others.
_COMPILED = (
    INT4,
    GroupedFormat(table=tuple(range(-8, 8))),
    "small table",
    "table",
    GroupedFormat(5),
    GroupedFormat(5, has_minimum=True),
    GroupedFormat(6, 16),
    GroupedFormat(8),
)


def _number(form: GroupedFormat) -> int | None:
    """The compiled code's number of a format that it multiplies."""
    if form in _COMPILED:
        return _COMPILED.index(form)
    if form.table is None or form != GroupedFormat(table=form.table):
        return None
    return _COMPILED.index("small table" if max(map(abs, form.table)) <= 16 else "table")


def multiplies_all(form: GroupedFormat) -> bool:
    """Whether a reference multiplies a format: it does all."""
    return True


def multiplies_native(form: GroupedFormat) -> bool:
    """Whether `linear_grouped_native` multiplies a format, and a batch of rows not more slowly than int8.

    Where products are added in pairs of 16 bits (AVX2), values of 8 bits are multiplied digit by digit: a batch of 64
    rows took 2.6 to 3.3 times as long as in int8, and of 5 bits 1.1 times.
    """
    number = _number(form)
    if number is None or native is None:
        return False
    return not (native.pairs_are_limited() and number in (_COMPILED.index("table"), _COMPILED.index(GroupedFormat(8))))


class NativeGrouped(NativeLinear):
    """`linear_grouped` by compiled code, with a weight in the format of this number."""

    def __init__(self, number: int, in_size: int, out_size: int, packed: Tensor, bias: Tensor | None, use: Use) -> None:
        assert native is not None
        super().__init__(in_size, out_size, (packed,), bias, use, partial(native.linear_grouped, number))
        self.number = number

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [count, in] float32 of the weight, with these numbers [count] int64."""
        assert native is not None
        assert ids.dtype == torch.int64
        assert ids.is_contiguous()
        out, (packed,) = torch.empty(len(ids), self.in_size), self.packed
        addresses = ids.data_ptr(), packed.data_ptr(), out.data_ptr()
        native.embedding_grouped(self.number, DTYPES[out.dtype], *addresses, len(ids), self.in_size, self.out_size)
        return out


def linear_grouped_native(weight: Tensor | GroupedWeight | PackedInt8, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    if not isinstance(weight, GroupedWeight):
        return linear_int8_native(weight, bias, use)
    assert native is not None
    number, (out_size, in_size) = _number(weight.format), weight.shape
    assert number is not None
    table = None if weight.format.table is None else torch.tensor(weight.format.table, dtype=torch.int8)
    parts = weight.values, weight.scales, weight.minimums, table
    assert all(part is None or part.is_contiguous() for part in parts)
    packed = torch.empty(native.grouped_bytes(number, in_size, out_size), dtype=torch.uint8)
    addresses = (0 if part is None else part.data_ptr() for part in parts)
    native.pack_grouped(number, *addresses, packed.data_ptr(), in_size, out_size)
    return NativeGrouped(number, in_size, out_size, packed, bias, use)
