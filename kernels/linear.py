"""Matrix products with the weights of a model, unquantized: by torch, by oneDNN, and by compiled code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .native_module import DTYPES, native, takes
from .recording import empty
from .silu_and_mul import silu_and_mul, silu_and_mul_cpu, silu_and_mul_native

PANEL = 32  # packed weights have room for a multiple of this many outputs: the widest panel of any instruction set
_TORCH_IS_FAST = ("amx", "avx512")  # oneDNN multiplies in bfloat16 there


class Linear(Protocol):
    """Maps x [rows, in] to x · weightᵀ + bias [rows, out]."""

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
        spare = _padded(len(x)) - len(x)
        rows = functional.pad(x, (0, 0, 0, spare)) if spare else x
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(self.dtype), self.weight, self.bias, "none", [], ""
        )
        return product[: len(x)].to(x.dtype)


def _padded(rows: int) -> int:
    """The number of rows that oneDNN multiplies for so many: at most an eighth more.

    oneDNN compiles code for each number of rows, about half a megabyte for each shape of weight, and keeps it. It sums
    a single row in a different order from a batch's, but a row's result must not depend on its batch.
    """
    step = 1 << max(1, rows.bit_length() - 4)
    return -(-rows // step) * step


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Make a product with a fixed weight.

    weight  [out, in]; the caller keeps no reference to it, so that another layout may replace it
    bias    [out] or None
    """
    return _Plain(weight, bias)


def linear_cpu(weight: Tensor, bias: Tensor | None) -> Linear:
    """`linear` with the weight laid out in oneDNN's blocks once, instead of at every call.

    In float32 if oneDNN has no fast product in the weight's dtype: torch's own takes up to forty times as long. A row's
    result is the same to the last bit in any batch.
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
    """`linear` of silu(gate) · up; takes [rows, 2 * in], as `silu_and_mul` does."""
    return _Gated(silu_and_mul, linear(weight, bias))


def gated_linear_cpu(weight: Tensor, bias: Tensor | None) -> Linear:
    return _Gated(silu_and_mul_cpu, linear_cpu(weight, bias))


def gated_linear_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return _Gated(silu_and_mul_native, linear_cpu(weight, bias))


class NativeLinear:
    """A product by compiled code, with a packed weight. A row's result is the same to the last bit in any batch.

    multiply   takes the addresses of x, of the packed weight's parts, of the bias and of the output
    out_dtype  the product's dtype; None: x's
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        packed: tuple[Tensor, ...],
        bias: Tensor | None,
        is_gated: bool,
        multiply: Callable[..., None],
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.in_size, self.packed = in_size, packed
        self._out_size, self._bias = out_size, bias
        self._addresses = *(part.data_ptr() for part in packed), 0 if bias is None else bias.data_ptr()
        self._is_gated = is_gated
        self._multiply = multiply
        self._out_dtype = out_dtype

    def __call__(self, x: Tensor, /) -> Tensor:
        assert takes(x)
        rows, width = x.shape
        assert width == self.in_size * (2 if self._is_gated else 1)
        dtype = self._out_dtype or x.dtype
        out = empty(rows, self._out_size, dtype=dtype)
        addresses = x.data_ptr(), *self._addresses, out.data_ptr()
        sizes = rows, self.in_size, self._out_size
        self._multiply(DTYPES[x.dtype], *addresses, DTYPES[dtype], *sizes, self._is_gated)
        return out


def prefers_whole_native() -> bool:
    """Whether `linear_whole_native` is faster than torch on this processor."""
    return native is not None and native.instruction_set() not in _TORCH_IS_FAST


def linear_whole_native(weight: Tensor, bias: Tensor | None) -> Linear:
    """`linear` by compiled code, summed in float32, for processors without AVX-512, where torch is slow."""
    return _native_whole(weight, bias, is_gated=False) if weight.dtype in DTYPES else linear_cpu(weight, bias)


def gated_linear_whole_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return _native_whole(weight, bias, is_gated=True) if weight.dtype in DTYPES else gated_linear_native(weight, bias)


def head_whole_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return (
        _native_whole(weight, bias, is_gated=False, out_dtype=torch.float32)
        if weight.dtype in DTYPES
        else linear_cpu(weight, bias)
    )


def _native_whole(weight: Tensor, bias: Tensor | None, is_gated: bool, out_dtype: torch.dtype | None = None) -> Linear:
    assert native is not None
    assert takes(weight)
    out_size, in_size = weight.shape
    packed = torch.empty(-(-out_size // PANEL) * PANEL * in_size, dtype=weight.dtype)
    native.pack_whole(DTYPES[weight.dtype], weight.data_ptr(), packed.data_ptr(), in_size, out_size)
    return NativeLinear(in_size, out_size, (packed,), bias, is_gated, native.linear_whole, out_dtype)
