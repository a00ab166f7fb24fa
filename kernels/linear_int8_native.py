"""Products with weights in int8 by compiled code: `linear_int8`, and `linear_int8_weight` for the matrix unit of AMX.

A row has the same bits alone and in any batch. Weights are [out, in] float32 or bfloat16, contiguous.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.linear import Linear
from kernels.linear_int8 import GROUP
from kernels.native_module import DTYPES, native, takes
from kernels.recording import empty

PANEL = 32  # outputs that the packed layouts keep together
DEPTH = 32  # inputs that the layout of AMX is filled up to a multiple of


class _Native:
    """
    num_values, num_scales  of the packed weight
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        is_gated: bool,
        pack: Callable[..., None],
        multiply: Callable[..., None],
        num_values: int,
        num_scales: int,
    ) -> None:
        assert takes(weight)
        self._out_size, self._in_size = weight.shape
        packed, scales = torch.empty(num_values, dtype=torch.int8), torch.empty(num_scales)
        sizes = self._in_size, self._out_size
        pack(DTYPES[weight.dtype], weight.data_ptr(), packed.data_ptr(), scales.data_ptr(), *sizes)
        self._owned = packed, scales, bias
        self._addresses = packed.data_ptr(), scales.data_ptr(), 0 if bias is None else bias.data_ptr()
        self._is_gated = is_gated
        self._multiply = multiply

    def __call__(self, x: Tensor, /) -> Tensor:
        assert takes(x)
        rows, width = x.shape
        assert width == self._in_size * (2 if self._is_gated else 1)
        out = empty(rows, self._out_size, dtype=x.dtype)
        addresses = x.data_ptr(), *self._addresses, out.data_ptr()
        self._multiply(DTYPES[x.dtype], *addresses, rows, self._in_size, self._out_size, self._is_gated)
        return out


def has_native_int8() -> bool:
    """Whether the module was compiled."""
    return native is not None


def has_native_int8_weight() -> bool:
    """Whether the module was compiled with it, and the processor and the system have AMX for bfloat16."""
    return native is not None and native.instruction_set() == "amx"


def linear_int8_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return _int8(weight, bias, is_gated=False)


def gated_linear_int8_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return _int8(weight, bias, is_gated=True)


def linear_int8_weight_native(weight: Tensor, bias: Tensor | None) -> Linear:
    """Activations are rounded to bfloat16, sums are float32."""
    return _int8_weight(weight, bias, is_gated=False)


def gated_linear_int8_weight_native(weight: Tensor, bias: Tensor | None) -> Linear:
    """Like `linear_int8_weight_native`; what is gated is rounded once."""
    return _int8_weight(weight, bias, is_gated=True)


def _int8(weight: Tensor, bias: Tensor | None, is_gated: bool) -> Linear:
    assert native is not None
    out_size, in_size = weight.shape
    panels, groups = -(-out_size // PANEL), -(-in_size // GROUP)
    sizes = panels * groups * GROUP * PANEL, panels * groups * 2 * PANEL
    return _Native(weight, bias, is_gated, native.pack_int8, native.linear_int8, *sizes)


def _int8_weight(weight: Tensor, bias: Tensor | None, is_gated: bool) -> Linear:
    assert native is not None
    out_size, in_size = weight.shape
    panels, depth = -(-out_size // PANEL), -(-in_size // DEPTH) * DEPTH
    sizes = panels * depth * PANEL, panels * PANEL
    return _Native(weight, bias, is_gated, native.pack_int8_weight, native.linear_int8_weight, *sizes)
