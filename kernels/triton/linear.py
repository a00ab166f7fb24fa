"""Products on a GPU, of weights as they are, in int8, in float8 or in groups of codes.

A kernel of ours multiplies few rows, by default only those of quantized weights, which it widens in registers on their
way to the tensor cores. The library multiplies many rows, from a widened copy of a quantized weight. Measurements of a
GPU, where there is a table of them, replace the defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from ..activate import Activation
from ..grouped_weight import GroupedFormat, GroupedWeight
from ..linear import PLAIN, Linear, Use, linear
from ..linear_quantized import quantize_to_fp8, quantize_to_int8
from .activate import activate_triton
from .configs import IS_INTERPRETED, capability, num_processors
from .linear_dequantized import multiply_dequantized
from .linear_fixed import FixedLinear
from .product import NO_KERNEL, Config, DefaultConfig, Weight, choose, multiply

FP8_CAPABILITY = (8, 9)
WIDE, NARROW = 128, 32  # inputs of a group of values in float8

# Rows that our kernel multiplies by default. It is an estimate for an H100, until a GPU's table replaces it:
# - Our kernel takes 0.0067 ps for an element of the weight and a row, at 300 TFLOP/s. In a tile of 128 × 128 × 64 the
#   tensor cores work for 512 cycles, and a scheduler issues 608 instructions, hardly overlapped: 450 TFLOP/s at best.
# - A copy of the element takes 1 ps at 3 TB/s, one byte read and two written. The library then takes 0.0029 ps a row,
#   at 700 TFLOP/s.
# Both take the same time at 260 rows. If our kernel reached 400 TFLOP/s, they would at 470.
KERNEL_ROWS = 256
FUSED_ROWS = 16  # every program computes the gates of its rows; with more rows, computing them once is faster
PROGRAMS_PER_PROCESSOR = 2
FEWEST_TILES = 4  # of a split, so that loads are in flight while it multiplies
MOST_SPLITS = 8  # each writes its sums in float32, which are read again


@dataclass(frozen=True, slots=True)
class _Linear:
    op: str
    weight: Weight
    bias: Tensor | None
    default: DefaultConfig

    def __call__(self, x: Tensor, /) -> Tensor:
        config = choose(self.op, x, self.weight, self.default)
        if config != NO_KERNEL:
            return multiply(x, self.weight, self.bias, config)
        if self.weight.scales is None:
            return functional.linear(x, self.weight.values, self.bias)
        return multiply_dequantized(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _ActivatedLinear:
    """The product of an activation. With a configuration, one kernel computes the activation as it reads the rows."""

    linear: _Linear
    activation: Activation
    default: DefaultConfig

    def __call__(self, x: Tensor, /) -> Tensor:
        linear = self.linear
        config = choose(f"gated_{linear.op}", x, linear.weight, self.default)
        if config != NO_KERNEL:
            return multiply(x, linear.weight, linear.bias, config, activation=self.activation)
        return linear(activate_triton(x, self.activation))


class _FixedRouter:
    """A router's product, in float32, with sums in a fixed order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._linear = FixedLinear(Weight(weight), None if bias is None else bias.float(), None)

    def __call__(self, x: Tensor, /) -> Tensor:
        return self._linear(x.float())


@dataclass(frozen=True, slots=True)
class WeightMaker:
    """Makes the products of a format.

    op                      its name in the tables of configurations
    prepare                 quantizes a weight, or leaves it as it is
    default, default_gated  choose a configuration where nothing was measured
    """

    op: str
    prepare: Callable[[Any], Weight]
    default: DefaultConfig
    default_gated: DefaultConfig

    def __call__(self, weight: Any, bias: Tensor | None, use: Use = PLAIN, /) -> Linear:
        if use.is_router:
            return _FixedRouter(weight.float(), bias) if use.is_deterministic else linear(weight, bias, use)
        prepared = self.prepare(weight)
        if use.is_deterministic:
            return FixedLinear(prepared, bias, use.activation)
        product = _Linear(self.op, prepared, bias, self.default)
        return _ActivatedLinear(product, use.activation, self.default_gated) if use.activation else product


def library(rows: int, sizes: tuple[int, int], device: torch.device) -> Config:
    """Use the library, which our kernel replaces only where it was measured to be faster."""
    return NO_KERNEL


def default_config(rows: int, sizes: tuple[int, int], device: torch.device) -> Config:
    """Our kernel for few rows, the library for many."""
    return kernel_config(rows, sizes, device) if rows <= KERNEL_ROWS else NO_KERNEL


def kernel_config(rows: int, sizes: tuple[int, int], device: torch.device, in_groups: bool = False) -> Config:
    """Choose tiles by the number of rows, and splits so that every processor has programs."""
    out_size, in_size = sizes
    if rows == 32 and in_groups:  # in half of the tile, registers do not suffice for compute capability 10.0
        tile = Config(rows=32, outputs=128, inputs=128, splits=1, num_warps=8, num_stages=4)
    elif rows <= 32:
        inputs = 128 if in_size % 128 == 0 else 64
        tile = Config(rows=max(rows, 16), outputs=64, inputs=inputs, splits=1, num_warps=4, num_stages=4)
    elif rows == 64:
        tile = Config(rows=64, outputs=128, inputs=64, splits=1, num_warps=8, num_stages=4)
    else:
        tile = Config(rows=128, outputs=128, inputs=64, splits=1, num_warps=8, num_stages=3)
    programs = triton.cdiv(rows, tile.rows) * triton.cdiv(out_size, tile.outputs)
    wanted = PROGRAMS_PER_PROCESSOR * num_processors(device) // programs
    splits = min(wanted, in_size // tile.inputs // FEWEST_TILES, MOST_SPLITS)
    return replace(tile, splits=max(splits, 1))


def grouped_config(rows: int, sizes: tuple[int, int], device: torch.device) -> Config:
    """`default_config` for weights in groups."""
    return kernel_config(rows, sizes, device, in_groups=True) if rows <= KERNEL_ROWS else NO_KERNEL


def gated_grouped_config(rows: int, sizes: tuple[int, int], device: torch.device) -> Config:
    return grouped_config(rows, sizes, device) if rows <= FUSED_ROWS else NO_KERNEL


def default_gated_config(rows: int, sizes: tuple[int, int], device: torch.device) -> Config:
    return default_config(rows, sizes, device) if rows <= FUSED_ROWS else NO_KERNEL


def to_int8(weight: Tensor) -> Weight:
    return Weight(*quantize_to_int8(weight))


def to_fp8(weight: Tensor | GroupedWeight) -> Weight:
    """Raises ValueError on a GPU without float8."""
    if isinstance(weight, GroupedWeight):
        return in_groups(weight)
    if weight.is_cuda and (found := torch.cuda.get_device_capability(weight.device)) < FP8_CAPABILITY:
        raise ValueError(
            "--quantization fp8 needs a GPU of compute capability 8.9 or higher; this one has "
            f"{found[0]}.{found[1]}; --quantization int8 runs on it"
        )
    return Weight(*quantize_to_fp8(weight))


def in_groups(weight: GroupedWeight) -> Weight:
    """The same values. Large groups are cut into those of WIDE inputs, which a tile of a product lies within."""
    values, scales, group = weight.values.contiguous(), weight.scales.contiguous(), weight.format.group
    if weight.format.is_float:
        if scales.shape[1] == 1:
            return Weight(values.flatten(1), scales.flatten())
        parts = group // (WIDE if group % WIDE == 0 else NARROW)
        values, scales = values.unflatten(2, (parts, -1)).flatten(1, 2), scales.repeat_interleave(parts, 1)
        group //= parts
    minimums = None if weight.minimums is None else weight.minimums.contiguous()
    return Weight(values, scales, minimums, group, weight.format.table)


def multiplies(form: GroupedFormat) -> bool:
    """Whether the current GPU multiplies a format: all of them convert whole numbers, and some float8."""
    return not form.is_float or IS_INTERPRETED or capability() >= FP8_CAPABILITY[0] * 10 + FP8_CAPABILITY[1]


class GroupedMaker:
    """Makes `linear_grouped_weight`: a weight that is not in groups is multiplied as it is."""

    def prepare(self, weight: Tensor | GroupedWeight) -> Weight:
        return _maker_of(weight).prepare(weight)

    def __call__(self, weight: Tensor | GroupedWeight, bias: Tensor | None, use: Use = PLAIN, /) -> Linear:
        return _maker_of(weight)(weight, bias, use)


def _maker_of(weight: Tensor | GroupedWeight) -> WeightMaker:
    if isinstance(weight, Tensor):
        return linear_triton
    if weight.format.is_float:
        return linear_fp8_weight_triton
    return _linear_4_bits if weight.format.bits == 4 else _linear_8_bits


linear_grouped_triton = GroupedMaker()
linear_triton = WeightMaker("linear", Weight, library, library)
_linear_4_bits = WeightMaker("linear_4_bits", in_groups, grouped_config, gated_grouped_config)
_linear_8_bits = WeightMaker("linear_8_bits", in_groups, grouped_config, gated_grouped_config)
linear_int8_weight_triton = WeightMaker("linear_int8_weight", to_int8, default_config, default_gated_config)
linear_fp8_weight_triton = WeightMaker("linear_fp8_weight", to_fp8, default_config, default_gated_config)
