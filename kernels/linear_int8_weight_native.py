"""`linear_int8_weight` by compiled code, for processors with the matrix unit of AMX."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear import Linear
from kernels.native_module import DTYPES, native, takes

PANEL = 32  # outputs that the packed layout keeps together
DEPTH = 32  # inputs that it is filled up to a multiple of


def has_native_int8_weight() -> bool:
    """Whether the module was compiled with it, and the processor and the system have AMX for bfloat16."""
    return native is not None and bool(native.has_amx)


class _NativeInt8Weight:
    def __init__(self, weight: Tensor, bias: Tensor | None, is_gated: bool) -> None:
        assert native is not None
        assert takes(weight)
        self._out_size, self._in_size = weight.shape
        panels, depth = -(-self._out_size // PANEL), -(-self._in_size // DEPTH) * DEPTH
        packed = torch.empty(panels * depth * PANEL, dtype=torch.int8)
        scales = torch.empty(panels * PANEL)
        sizes = self._in_size, self._out_size
        native.pack_int8_weight(DTYPES[weight.dtype], weight.data_ptr(), packed.data_ptr(), scales.data_ptr(), *sizes)
        self._owned = packed, scales, bias
        self._addresses = packed.data_ptr(), scales.data_ptr(), 0 if bias is None else bias.data_ptr()
        self._is_gated = is_gated
        self._multiply = native.linear_int8_weight

    def __call__(self, x: Tensor, /) -> Tensor:
        assert takes(x)
        rows, width = x.shape
        assert width == self._in_size * (2 if self._is_gated else 1)
        out = torch.empty(rows, self._out_size, dtype=x.dtype)
        addresses = x.data_ptr(), *self._addresses, out.data_ptr()
        self._multiply(DTYPES[x.dtype], *addresses, rows, self._in_size, self._out_size, self._is_gated)
        return out


def linear_int8_weight_native(weight: Tensor, bias: Tensor | None) -> Linear:
    """`linear_int8_weight`, with activations rounded to bfloat16 and sums in float32. A row's product is the same to
    the last bit alone and in any batch.

    weight  [out, in] float32 or bfloat16, contiguous
    """
    return _NativeInt8Weight(weight, bias, is_gated=False)


def gated_linear_int8_weight_native(weight: Tensor, bias: Tensor | None) -> Linear:
    """`gated_linear_int8_weight`, like `linear_int8_weight_native`; what is gated is rounded once."""
    return _NativeInt8Weight(weight, bias, is_gated=True)
