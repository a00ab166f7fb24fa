"""Products with weights as they are by compiled code, for processors without AVX-512: torch has no fast ones there.

A row has the same bits alone and in any batch. Sums are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda_server.kernels.linear import Linear, gated_linear_native, linear_cpu
from pagoda_server.kernels.linear_int8_native import PANEL, NativeLinear
from pagoda_server.kernels.native_module import DTYPES, native, takes

_TORCH_IS_FAST = ("amx", "avx512")  # oneDNN multiplies in bfloat16 there


def prefers_whole_native() -> bool:
    """Whether these products take less time than torch's on this processor."""
    return native is not None and native.instruction_set() not in _TORCH_IS_FAST


def linear_whole_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return _whole(weight, bias, is_gated=False) if weight.dtype in DTYPES else linear_cpu(weight, bias)


def gated_linear_whole_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return _whole(weight, bias, is_gated=True) if weight.dtype in DTYPES else gated_linear_native(weight, bias)


def head_whole_native(weight: Tensor, bias: Tensor | None) -> Linear:
    return (
        _whole(weight, bias, is_gated=False, out_dtype=torch.float32)
        if weight.dtype in DTYPES
        else linear_cpu(weight, bias)
    )


def _whole(weight: Tensor, bias: Tensor | None, is_gated: bool, out_dtype: torch.dtype | None = None) -> Linear:
    assert native is not None
    assert takes(weight)
    out_size, in_size = weight.shape
    packed = torch.empty(-(-out_size // PANEL) * PANEL * in_size, dtype=weight.dtype)
    native.pack_whole(DTYPES[weight.dtype], weight.data_ptr(), packed.data_ptr(), in_size, out_size)
    return NativeLinear(in_size, out_size, (packed,), bias, is_gated, native.linear_whole, out_dtype)
