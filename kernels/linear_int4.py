"""Matrix products of 4-bit weights, as checkpoints hold them, and 8-bit activations.

Weights have a scale and a minimum for every 32 inputs of an output, and are not rounded a second time. Activations are
quantized as in `linear_int8`. With x = s * a + l in a group of activations, and w = d * q + m in each of its groups of
weights:

    sum of x * w  =  s * (sum over groups of weights of d * (sum of q * a) + m * (sum of a))  +  l * (sum of w)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .gate_and_mul import Activation, gate_and_mul
from .linear import PLAIN, Linear, NativeLinear, Use
from .linear_int8 import GROUP, linear_int8, linear_int8_native, quantize_rows
from .native_module import native

WEIGHT_GROUP = 32  # inputs that share a scale and a minimum


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A matrix [out, in] whose elements are scale * value + minimum, with values from 0 to 15.

    values    [out, groups, 16] uint8: of a group of 32 inputs, the first 16 in low nibbles, the others in high nibbles
    scales    [out, groups] float16
    minimums  [out, groups] float16
    """

    values: Tensor
    scales: Tensor
    minimums: Tensor

    @staticmethod
    def allocate(out_size: int, in_size: int) -> Int4Weight:
        """Allocate an uninitialized weight. `in_size` is a multiple of 32."""
        groups, rest = divmod(in_size, WEIGHT_GROUP)
        assert rest == 0
        return Int4Weight(
            torch.empty(out_size, groups, WEIGHT_GROUP // 2, dtype=torch.uint8),
            torch.empty(out_size, groups, dtype=torch.float16),
            torch.empty(out_size, groups, dtype=torch.float16),
        )

    @staticmethod
    def of_parts(values: Tensor, scales: Tensor, minimums: Tensor) -> Int4Weight:
        """A weight of parts that were read from somewhere. Raises ValueError if they are not as above."""
        if values.dtype != torch.uint8 or values.ndim != 3 or values.shape[2] != WEIGHT_GROUP // 2:
            raise ValueError(f"its values are {_described(values)}, not uint8 [out, groups, {WEIGHT_GROUP // 2}]")
        for name, part in (("scales", scales), ("minimums", minimums)):
            if part.dtype != torch.float16 or part.shape != values.shape[:2]:
                raise ValueError(f"its {name} are {_described(part)}, not float16 {list(values.shape[:2])}")
        return Int4Weight(values, scales, minimums)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), self.values.shape[1] * WEIGHT_GROUP

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.minimums.nbytes

    def split(self, sizes: int | list[int]) -> list[Int4Weight]:
        """Views of `sizes` rows each, like `Tensor.split`."""
        parts = (torch.split(part, sizes) for part in (self.values, self.scales, self.minimums))
        return [Int4Weight(*rows) for rows in zip(*parts, strict=True)]

    def copy_(self, source: Int4Weight) -> None:
        self.values.copy_(source.values)
        self.scales.copy_(source.scales)
        self.minimums.copy_(source.minimums)

    def nibbles(self) -> Tensor:
        """[out, groups, 32] uint8, the values one by one."""
        return torch.cat([self.values & 15, self.values >> 4], dim=-1)

    def dequantize(self) -> Tensor:
        """[out, in] float32, each element rounded once."""
        values = self.nibbles() * self.scales.float()[..., None]
        values += self.minimums.float()[..., None]
        return values.flatten(1)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class _Int4:
    weight: Int4Weight
    bias: Tensor | None
    activation: Activation

    def __call__(self, x: Tensor, /) -> Tensor:
        rows, scales, least = quantize_rows(gate_and_mul(x.float(), self.activation) if self.activation else x)
        halves = GROUP // WEIGHT_GROUP
        missing = -self.weight.values.shape[1] % halves  # groups of weights in the last group of activations
        rows = rows.unflatten(2, (halves, -1)).double()
        values = functional.pad(self.weight.nibbles(), (0, 0, 0, missing)).unflatten(1, (-1, halves)).double()
        weight_scales = functional.pad(self.weight.scales.float(), (0, missing)).unflatten(1, (-1, halves))
        minimums = functional.pad(self.weight.minimums.float(), (0, missing)).unflatten(1, (-1, halves))
        product = torch.zeros(len(x), len(self.weight.values))
        for group in range(scales.shape[1]):
            scaled, total = torch.zeros_like(product), torch.zeros(len(self.weight.values))
            for half in range(halves):
                part, weights = rows[:, group, half], values[:, group, half]
                d, m = weight_scales[:, group, half], minimums[:, group, half]
                scaled += (part @ weights.T).float() * d + part.sum(dim=-1, keepdim=True).float() * m  # exact sums
                total += weights.sum(dim=-1).float() * d + WEIGHT_GROUP * m
            product += scaled * scales[:, group, None] + least[:, group, None] * total
        if self.bias is not None:
            product += self.bias.float()
        return product.to(x.dtype)


def linear_int4(weight: Tensor | Int4Weight, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    """`linear` with a weight of 4 bits: sums within a group are exact, and groups are added in float32.

    A weight that the checkpoint does not hold in 4 bits is multiplied by `linear_int8`.
    """
    return _Int4(weight, bias, use.activation) if isinstance(weight, Int4Weight) else linear_int8(weight, bias, use)


def linear_int4_native(weight: Tensor | Int4Weight, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    if not isinstance(weight, Int4Weight):
        return linear_int8_native(weight, bias, use)
    assert native is not None
    out_size, in_size = weight.shape
    parts = weight.values, weight.scales, weight.minimums
    assert all(part.is_contiguous() for part in parts)
    packed = torch.empty(native.int4_bytes(in_size, out_size), dtype=torch.uint8)
    native.pack_int4(*(part.data_ptr() for part in parts), packed.data_ptr(), in_size, out_size)
    return NativeLinear(in_size, out_size, (packed,), bias, use, native.linear_int4)
