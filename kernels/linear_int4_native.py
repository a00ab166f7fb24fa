"""Products with weights in 4 bits by compiled code, and of what a checkpoint has no 4 bits for, in int8.

A row has the same bits alone and in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda_server.kernels.linear import Linear
from pagoda_server.kernels.linear_int4 import Int4Weight
from pagoda_server.kernels.linear_int8_native import (
    NativeLinear,
    gated_linear_int8_native,
    head_int8_native,
    linear_int8_native,
)
from pagoda_server.kernels.native_module import native


def linear_int4_native(weight: Tensor | Int4Weight, bias: Tensor | None) -> Linear:
    return _int4(weight, bias, is_gated=False) if isinstance(weight, Int4Weight) else linear_int8_native(weight, bias)


def gated_linear_int4_native(weight: Tensor | Int4Weight, bias: Tensor | None) -> Linear:
    if isinstance(weight, Int4Weight):
        return _int4(weight, bias, is_gated=True)
    return gated_linear_int8_native(weight, bias)


def head_int4_native(weight: Tensor | Int4Weight, bias: Tensor | None) -> Linear:
    if isinstance(weight, Int4Weight):
        return _int4(weight, bias, is_gated=False, out_dtype=torch.float32)
    return head_int8_native(weight, bias)


def _int4(weight: Int4Weight, bias: Tensor | None, is_gated: bool, out_dtype: torch.dtype | None = None) -> Linear:
    assert native is not None
    out_size, in_size = weight.shape
    parts = weight.values, weight.scales, weight.minimums
    assert all(part.is_contiguous() for part in parts)
    packed = torch.empty(native.int4_bytes(in_size, out_size), dtype=torch.uint8)
    native.pack_int4(*(part.data_ptr() for part in parts), packed.data_ptr(), in_size, out_size)
    return NativeLinear(in_size, out_size, (packed,), bias, is_gated, native.linear_int4, out_dtype)
