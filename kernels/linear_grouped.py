"""Matrix products of weights in groups, as checkpoints hold them, and 8-bit activations.

Weights are not rounded a second time. Activations are quantized as in `linear_int8`. With x = s * a + l in a group of
activations, and w = d * v + m in each of its groups of weights:

    sum of x * w  =  s * (sum over groups of weights of d * (sum of v * a) + m * (sum of a))  +  l * (sum of w)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from .activate import Activation, activate
from .gguf_blocks import KINDS, table_tensor
from .grouped_weight import INT4, GroupedFormat, GroupedWeight
from .linear import PANEL, PLAIN, Linear, NativeLinear, Use
from .linear_int8 import GROUP, PackedInt8, linear_int8, linear_int8_native, quantize_rows
from .native_module import DTYPES, address, native


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


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """A weight [out, in] in groups, which is packed some rows at a time: by `copy_`, or from the blocks of a file.

    number  the compiled code's number of the format
    packed  [bytes] uint8, panels of outputs, and behind the last one the format's table, if it has one. Each part of a
            split writes a table where the next one's panels begin, so the parts are packed in order.
    """

    format: GroupedFormat
    shape: tuple[int, int]
    number: int
    packed: Tensor

    @staticmethod
    def allocate(form: GroupedFormat, out_size: int, in_size: int) -> PackedGroups:
        """Allocate the weight of `linear_grouped_native`, in a format that it multiplies."""
        assert native is not None
        number = _number(form)
        assert number is not None
        packed = torch.empty(native.grouped_bytes(number, in_size, out_size), dtype=torch.uint8)
        return PackedGroups(form, (out_size, in_size), number, packed)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def split(self, sizes: list[int]) -> list[PackedGroups]:
        """Views of so many rows each: multiples of PANEL, but for the last."""
        assert native is not None
        starts = [0, *accumulate(sizes)]
        assert all(start % PANEL == 0 for start in starts[:-1])
        none, *ends = (native.grouped_bytes(self.number, self.shape[1], start) for start in (0, *starts))
        return [
            replace(self, shape=(size, self.shape[1]), packed=self.packed[first - none : last])
            for size, first, last in zip(sizes, ends, ends[1:], strict=False)
        ]

    def copy_(self, weight: GroupedWeight) -> None:
        """Pack rows of the same format."""
        assert native is not None
        assert weight.format == self.format
        assert weight.shape == self.shape
        parts = weight.values, weight.scales, weight.minimums
        assert all(part is None or part.is_contiguous() for part in parts)
        table, (out_size, in_size) = table_tensor(self.format.table), self.shape
        addresses = *(address(part) for part in parts), address(table), self.packed.data_ptr()
        groups = weight.scales.shape[1]
        row_bytes = groups * self.format.values_shape[1]
        native.pack_grouped(self.number, *addresses, row_bytes, groups, in_size, out_size)

    def copy_blocks(self, kind: str, blocks: Tensor, table: tuple[int, ...] | None) -> None:
        """Pack rows in the blocks of a GGUF file, whose groups have this format.

        Raises ValueError if they are not as many as these rows need.
        """
        assert native is not None
        assert blocks.dtype == torch.uint8
        assert blocks.is_contiguous()
        assert table == self.format.table
        codes, (out_size, in_size) = table_tensor(table), self.shape
        addresses = blocks.data_ptr(), blocks.nbytes, address(codes), self.packed.data_ptr()
        native.pack_grouped_blocks(self.number, KINDS.index(kind), *addresses, in_size, out_size)


class NativeGrouped(NativeLinear):
    """`linear_grouped` by compiled code."""

    def __init__(self, weight: PackedGroups, bias: Tensor | None, use: Use) -> None:
        assert native is not None
        self.number, (out_size, in_size) = weight.number, weight.shape
        super().__init__(in_size, out_size, (weight.packed,), bias, use, partial(native.linear_grouped, self.number))

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [count, in] float32 of the weight, with these numbers [count] int64."""
        assert native is not None
        assert ids.dtype == torch.int64
        assert ids.is_contiguous()
        out, (packed,) = torch.empty(len(ids), self.in_size), self.packed
        addresses = ids.data_ptr(), packed.data_ptr(), out.data_ptr()
        native.embedding_grouped(self.number, DTYPES[out.dtype], *addresses, len(ids), self.in_size, self.out_size)
        return out


def linear_grouped_native(
    weight: Tensor | GroupedWeight | PackedGroups | PackedInt8, bias: Tensor | None, use: Use = PLAIN
) -> Linear:
    if isinstance(weight, GroupedWeight):
        packed = PackedGroups.allocate(weight.format, *weight.shape)
        packed.copy_(weight)
        weight = packed
    return (
        NativeGrouped(weight, bias, use) if isinstance(weight, PackedGroups) else linear_int8_native(weight, bias, use)
    )
