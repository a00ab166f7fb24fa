"""Matrix products with the weights of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pagoda_server.kernels.silu_and_mul import silu_and_mul, silu_and_mul_cpu, silu_and_mul_native


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
    dtype: torch.dtype

    def __call__(self, x: Tensor, /) -> Tensor:
        # oneDNN sums a single row in another order than it sums the rows of a batch; a row's result must not tell.
        rows = x.expand(2, -1) if len(x) == 1 else x
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(self.dtype), self.weight, self.bias, "none", [], ""
        )
        return product[: len(x)].to(x.dtype)


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A product with a fixed weight.

    weight  [out, in]; the caller lets go of it, so that another layout may take its place
    bias    [out] or None
    """
    return _Plain(weight, bias)


def linear_cpu(weight: Tensor, bias: Tensor | None) -> Linear:
    """`linear` with the weight laid out in oneDNN's blocks once, instead of at every call.

    Float32 where oneDNN has no fast product in the weight's dtype: torch's own product takes up to forty times as long.
    A row of the product is the same to the last bit alone and in any batch.
    """
    is_fast = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.bfloat16 if is_fast else torch.float32
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), None)
    return _Packed(packed, None if bias is None else bias.to(dtype), dtype)


@dataclass(frozen=True, slots=True)
class _Gated:
    gate: Callable[[Tensor], Tensor]
    linear: Linear

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.linear(self.gate(x))


def gated_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """`linear` of silu(gate) · up: it takes [rows, 2 * in], as `silu_and_mul` does."""
    return _Gated(silu_and_mul, linear(weight, bias))


def gated_linear_cpu(weight: Tensor, bias: Tensor | None) -> Linear:
    return _Gated(silu_and_mul_cpu, linear_cpu(weight, bias))


def gated_linear_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return _Gated(silu_and_mul_native, linear_cpu(weight, bias))
