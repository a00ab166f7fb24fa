"""Matrix products of int8 weights and int8 activations, both with a scale for every 64 elements along the input.

Weights have a scale for every 32 elements where the values of neighbours are limited (AVX2).

One scale for a whole row of activations costs this project's default model 4 % of perplexity; one for every 64 elements
costs 0.8 ± 0.5 % (docs/performance.md). Rows do not share scales, so no request affects the precision of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from .activate import Activation, activate
from .gguf_blocks import KINDS, table_tensor
from .linear import PANEL, PLAIN, Linear, NativeLinear, Use
from .native_module import DTYPES, address, native

GROUP = 64  # elements of the input that share a scale


def quantize_weight(weight: Tensor, limits_pairs: bool = False) -> tuple[Tensor, Tensor]:
    """Round to the nearest, ties to even: weight = scale * value.

    weight        [out, in] floating point
    limits_pairs  keep the sum of inputs 2i and 2i + 1 within -128…128, since AVX2 adds their products in 16 bits;
                  groups of half the size make up for the larger steps
    return        [out, groups, GROUP] int8 in -127…127, zero beyond `in`; [out, groups, 1] float32 scales, or 2 a group
    """
    groups = _groups(weight).unflatten(-1, (2 if limits_pairs else 1, -1))
    greatest = groups.abs().amax(dim=-1)
    if limits_pairs:
        pairs = groups.unflatten(-1, (-1, 2)).sum(dim=-1).abs().amax(dim=-1)
        greatest = greatest.maximum(pairs * (127 / 127.99))
    inverse = torch.where(greatest > 0, 127 / greatest, 0.0)
    return (groups * inverse[..., None]).round().to(torch.int8).flatten(2), greatest / 127


def dequantize_weight(values: Tensor, scales: Tensor) -> Tensor:
    """[out, groups * GROUP] float32, from what `quantize_weight` returns."""
    parts: Tensor = values.unflatten(-1, (scales.shape[-1], -1))
    return (parts * scales[..., None]).flatten(1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round to the nearest, ties to even: x = scale * value + least.

    x       [rows, size] floating point
    return  [rows, groups, GROUP] uint8; [rows, groups] float32 scales; [rows, groups] float32, the least of each group
    """
    groups = _groups(x)
    least = groups.amin(dim=-1)
    extent = groups.amax(dim=-1) - least
    inverse = torch.where(extent > 0, 255 / extent, 0.0)
    return ((groups - least[..., None]) * inverse[..., None]).round().to(torch.uint8), extent / 255, least


def _groups(x: Tensor) -> Tensor:
    groups: Tensor = functional.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    return groups


@dataclass(frozen=True, slots=True)
class _Int8:
    values: Tensor
    scales: Tensor
    bias: Tensor | None
    activation: Activation | None

    def __call__(self, x: Tensor, /) -> Tensor:
        values, scales, least = quantize_rows(activate(x.float(), self.activation) if self.activation else x)
        product = torch.zeros(len(x), len(self.values))
        parts = self.scales.shape[-1]
        values = values.unflatten(-1, (parts, -1)).double()
        weights = self.values.unflatten(-1, (parts, -1)).double()
        for group in range(scales.shape[1]):
            for part in range(parts):
                whole = values[:, group, part] @ weights[:, group, part].T  # exact
                product += whole.float() * scales[:, group, None] * self.scales[:, group, part]
            total = (weights[:, group].sum(dim=-1) * self.scales[:, group]).sum(dim=-1)
            product += least[:, group, None] * total.float()
        if self.bias is not None:
            product += self.bias.float()
        return product.to(x.dtype)


def linear_int8(weight: Tensor, bias: Tensor | None, use: Use = PLAIN, limits_pairs: bool = False) -> Linear:
    """`linear` in int8: sums within a group are exact, and groups are added in float32, in order.

    Activations are not rounded before they are quantized.
    """
    return _Int8(*quantize_weight(weight, limits_pairs), bias, use.activation)


class NativeInt8(NativeLinear):
    """`linear_int8` by compiled code; `packed` holds the values in panels, then their scales and sums."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [count, in] float32 of the weight, with these numbers [count] int64."""
        assert native is not None
        assert ids.dtype == torch.int64
        assert ids.is_contiguous()
        out = torch.empty(len(ids), self.in_size)
        packed, scales = (part.data_ptr() for part in self.packed)
        native.embedding_int8(DTYPES[out.dtype], ids.data_ptr(), packed, scales, out.data_ptr(), len(ids), self.in_size)
        return out


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """A weight [out, in] in int8, which is packed some rows at a time: by `copy_`, or from the blocks of a file.

    Scales are not finite where a weight was not.

    values       [outputs, inputs] int8, in panels of outputs; both may be more than the weight has
    scales       [outputs, …] float32, in the same panels
    pack         the module's function that packs a weight in memory
    pack_blocks  the one that packs a weight in blocks
    """

    shape: tuple[int, int]
    values: Tensor
    scales: Tensor
    pack: Callable[..., None]
    pack_blocks: Callable[..., None]

    @staticmethod
    def allocate(out_size: int, in_size: int) -> PackedInt8:
        """The weight of `linear_int8_native`, whose scales are those of a group, then its sum."""
        assert native is not None
        outputs, groups = -(-out_size // PANEL) * PANEL, -(-in_size // GROUP)
        return PackedInt8(
            (out_size, in_size),
            torch.empty(outputs, groups * GROUP, dtype=torch.int8),
            torch.zeros(outputs, groups * (3 if native.pairs_are_limited() else 2)),  # no weight fills the last rows
            native.pack_int8,
            native.pack_int8_blocks,
        )

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def is_finite(self) -> bool:
        return bool(self.scales.isfinite().all())

    def split(self, sizes: list[int]) -> list[PackedInt8]:
        """Views of so many rows each: multiples of PANEL, but for the last."""
        starts = [0, *accumulate(sizes)]
        assert all(start % PANEL == 0 for start in starts[:-1])
        places = [slice(start, start + -(-size // PANEL) * PANEL) for start, size in zip(starts, sizes, strict=False)]
        return [
            replace(self, shape=(size, self.shape[1]), values=self.values[place], scales=self.scales[place])
            for size, place in zip(sizes, places, strict=True)
        ]

    def copy_(self, weight: Tensor) -> None:
        """Pack rows [out, in] of any floating point dtype."""
        assert weight.shape == self.shape
        weight = (weight if weight.dtype in DTYPES else weight.float()).contiguous()
        self.pack(DTYPES[weight.dtype], weight.data_ptr(), *self._addresses())

    def copy_blocks(self, kind: str, blocks: Tensor, table: tuple[int, ...] | None) -> None:
        """Pack rows in the blocks of a GGUF file, as `read_values` would read them.

        Raises ValueError if they are not as many as these rows need.
        """
        assert blocks.dtype == torch.uint8
        assert blocks.is_contiguous()
        codes = table_tensor(table)
        self.pack_blocks(KINDS.index(kind), blocks.data_ptr(), blocks.nbytes, address(codes), *self._addresses())

    def _addresses(self) -> tuple[int, int, int, int]:
        out_size, in_size = self.shape
        return self.values.data_ptr(), self.scales.data_ptr(), in_size, out_size


def linear_int8_native(weight: Tensor | PackedInt8, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    assert native is not None
    packed = as_packed(weight, PackedInt8.allocate)
    return NativeInt8(*packed.shape[::-1], (packed.values, packed.scales), bias, use, native.linear_int8)


def as_packed(weight: Tensor | PackedInt8, allocate: Callable[[int, int], PackedInt8]) -> PackedInt8:
    if isinstance(weight, PackedInt8):
        return weight
    packed = allocate(*weight.shape)
    packed.copy_(weight)
    return packed
