"""Products with unquantized weights on a GPU: by torch, or by our kernel where measurements found it faster."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..linear import Linear
from .product import NO_KERNEL, Config, DefaultConfig, Weight, choose, multiply
from .silu_and_mul import silu_and_mul_triton

MOST_ROWS = 64  # with more, arithmetic limits a product, and the library's is optimized


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Weight
    bias: Tensor | None

    def __call__(self, x: Tensor, /) -> Tensor:
        if len(x) <= MOST_ROWS:
            config = choose("linear", x, self.weight, library)
            if config != NO_KERNEL:
                return multiply(x, self.weight, self.bias, config)
        return functional.linear(x, self.weight.values, self.bias)


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """`linear` of silu(gate) · up. If `op` has a configuration, one kernel computes the gate as it reads the rows.

    linear  the product with `weight` and `bias`, used without a configuration
    """

    op: str
    linear: Linear
    weight: Weight
    bias: Tensor | None
    default_config: DefaultConfig

    def __call__(self, x: Tensor, /) -> Tensor:
        if len(x) <= MOST_ROWS:
            config = choose(self.op, x, self.weight, self.default_config)
            if config != NO_KERNEL:
                return multiply(x, self.weight, self.bias, config, is_gated=True)
        return self.linear(silu_and_mul_triton(x))


def library(rows: int, sizes: tuple[int, int], device: torch.device) -> Config:
    """The default: use the library, which our kernel replaces only where it was measured to be faster."""
    return NO_KERNEL


def linear_triton(weight: Tensor, bias: Tensor | None) -> Linear:
    """`linear` by torch, unless this GPU's table has a configuration for the number of rows and the weight."""
    return _Linear(Weight(weight), bias)


def gated_linear_triton(weight: Tensor, bias: Tensor | None) -> Linear:
    """`gated_linear`, in one kernel if this GPU's table has a configuration for it."""
    return GatedLinear("gated_linear", linear_triton(weight, bias), Weight(weight), bias, library)
