"""Products with weights in int8 by compiled code: `linear_int8`, and `linear_int8_weight` for the matrix unit of AMX.

A row has the same bits alone and in any batch. Weights are [out, in] float32 or bfloat16, contiguous.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagoda_server.kernels.linear import Linear
from pagoda_server.kernels.linear_int8 import GROUP
from pagoda_server.kernels.native_module import DTYPES, native, takes
from pagoda_server.kernels.recording import empty

PANEL = 32  # room is made for a multiple of so many outputs: the widest panel of all instruction sets
DEPTH = 32  # inputs that the layout of AMX is filled up to a multiple of


class NativeLinear:
    """A product by compiled code, which takes x, the parts of the packed weight, the bias and the output by address.

    out_dtype  of the product; None: that of x
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


class NativeInt8(NativeLinear):
    """packed: the values in panels, and beside them their scales and sums."""


def has_native_int8_weight() -> bool:
    """Whether the module was compiled with it, and the processor and the system have AMX for bfloat16."""
    return native is not None and native.instruction_set() == "amx"


def linear_int8_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return _int8(weight, bias, is_gated=False)


def gated_linear_int8_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return _int8(weight, bias, is_gated=True)


def head_int8_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return _int8(weight, bias, is_gated=False, out_dtype=torch.float32)


def linear_int8_weight_native(weight: Tensor, bias: Tensor | None) -> Linear:
    """Activations are rounded to bfloat16, sums are float32."""
    return _int8_weight(weight, bias, is_gated=False)


def gated_linear_int8_weight_native(weight: Tensor, bias: Tensor | None) -> Linear:
    """Like `linear_int8_weight_native`; what is gated is rounded once."""
    return _int8_weight(weight, bias, is_gated=True)


def _int8(weight: Tensor, bias: Tensor | None, is_gated: bool, out_dtype: torch.dtype | None = None) -> Linear:
    assert native is not None
    out_size, in_size = weight.shape
    panels, groups = -(-out_size // PANEL), -(-in_size // GROUP)
    numbers = 3 if native.pairs_are_limited() else 2  # a group's scales, and its sum
    packed = _packed(weight, native.pack_int8, panels * groups * GROUP * PANEL, panels * groups * numbers * PANEL)
    return NativeInt8(in_size, out_size, packed, bias, is_gated, native.linear_int8, out_dtype)


def _int8_weight(weight: Tensor, bias: Tensor | None, is_gated: bool) -> Linear:
    assert native is not None
    out_size, in_size = weight.shape
    panels, depth = -(-out_size // PANEL), -(-in_size // DEPTH) * DEPTH
    packed = _packed(weight, native.pack_int8_weight, panels * depth * PANEL, panels * PANEL)
    return NativeLinear(in_size, out_size, packed, bias, is_gated, native.linear_int8_weight)


def _packed(weight: Tensor, pack: Callable[..., None], num_values: int, num_scales: int) -> tuple[Tensor, Tensor]:
    assert takes(weight)
    out_size, in_size = weight.shape
    values, scales = torch.empty(num_values, dtype=torch.int8), torch.empty(num_scales)
    pack(DTYPES[weight.dtype], weight.data_ptr(), values.data_ptr(), scales.data_ptr(), in_size, out_size)
    return values, scales
