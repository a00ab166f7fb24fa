"""Products whose sums have the same order for a row, whatever the number of rows, on a GPU.

A weight's tiles depend on its sizes and the dtype of the rows alone, so the same instructions compute a row in every
batch. Its input is cut into splits of SPLIT_INPUTS. Where a weight has too few tiles to occupy the GPU, each split has
its own programs, and another launch adds up their sums; with more rows, a program adds up the splits of its tile. Both
do so in the order of the splits, from 0 on, in float32. Which program adds them up changes no bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from ..activate import Activation
from .activate import activate_triton
from .configs import num_processors
from .product import Config, Weight, multiply

SPLIT_INPUTS = 1024


def fixed_config(in_size: int, itemsize: int, in_groups: bool = False) -> Config:
    """The configuration for rows of a type of `itemsize` bytes, whatever their number.

    In 16 bits a tile has 64 rows. The arithmetic of rows that a small batch lacks takes less time than reading the
    weight; of a large batch, so many rows share each read of it. In float32, whose products no matrix instruction
    computes exactly, operands are in registers. A part of a weight in groups has whole groups.
    """
    splits = triton.cdiv(in_size, SPLIT_INPUTS)
    if itemsize == 4:
        inputs, stages = (64, 2) if in_groups else (32, 3)
        return Config(rows=16, outputs=64, inputs=inputs, splits=splits, num_warps=4, num_stages=stages)
    return Config(rows=64, outputs=128, inputs=64, splits=splits, num_warps=8, num_stages=4)


@dataclass(frozen=True, slots=True)
class FixedLinear:
    """`linear`, or that of a quantized weight, with sums in a fixed order."""

    weight: Weight
    bias: Tensor | None
    activation: Activation | None

    def __call__(self, x: Tensor, /) -> Tensor:
        x = activate_triton(x, self.activation) if self.activation else x
        out_size, in_size = self.weight.sizes
        config = fixed_config(in_size, x.dtype.itemsize, in_groups=self.weight.group > 0)
        tiles = triton.cdiv(len(x), config.rows) * triton.cdiv(out_size, config.outputs)
        return multiply(x, self.weight, self.bias, config, adds_up=tiles >= num_processors(x.device))
