"""Matrix products with the weights of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """x [rows, in] to x · weightᵀ + bias [rows, out]."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Plain:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, /) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Packed:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, /) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A product with a fixed weight, in whatever layout suits the device.

    weight  [out, in]; may be released by the caller afterwards
    bias    [out] or None
    """
    return _Plain(weight, bias)


def linear_cpu(weight: Tensor, bias: Tensor | None) -> Linear:
    """`linear` with bfloat16 weights laid out in oneDNN's blocks once, instead of at every call."""
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return _Packed(torch.ops.mkldnn._reorder_linear_weight(weight, None), bias)
    return _Plain(weight, bias)
