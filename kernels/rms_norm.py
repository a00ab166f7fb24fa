"""Root mean square and mean-subtracting normalization, and the addition to the residual stream before or after it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .native_module import DTYPES, native, takes
from .recording import empty


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich, 2019).

    x         [..., size], the weight's dtype; float32 without a residual
    weight    [size]
    residual  x's shape, in x's dtype or in float32; if given, x is added to it in place and the sum is normalized
    return    x's shape and the weight's dtype; a new tensor

    The mean is taken in float32.
    """
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(weight.dtype) * weight


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """`rms_norm` by torch's own kernel."""
    if residual is not None:
        x = residual.add_(x)
    if x.dtype != weight.dtype:
        return functional.rms_norm(x, weight.shape, None, eps).to(weight.dtype) * weight
    return functional.rms_norm(x, weight.shape, weight, eps)


def rms_norm_native(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """`rms_norm` and the addition in one pass."""
    if native is None or not takes(x) or weight.dtype not in DTYPES:
        return rms_norm_cpu(x, weight, eps, residual)
    return _norm_native(x, weight, None, eps, residual, is_centred=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """(x - mean(x)) / sqrt(variance(x) + eps) · weight + bias over the last dimension (Ba et al., 2016).

    Tensors are as in `rms_norm`; bias [size], the weight's dtype, or None. Everything is computed in float32.
    """
    if residual is not None:
        x = residual.add_(x)
    wide = functional.layer_norm(x.float(), weight.shape, weight.float(), None if bias is None else bias.float(), eps)
    return wide.to(weight.dtype)


def layer_norm_native(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    """`layer_norm` and the addition in one pass."""
    if native is None or not takes(x) or weight.dtype not in DTYPES:
        return layer_norm(x, weight, bias, eps, residual)
    return _norm_native(x, weight, bias, eps, residual, is_centred=True)


def _norm_native(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, *, is_centred: bool
) -> Tensor:
    assert native is not None
    out = empty(*x.shape, dtype=weight.dtype)
    size = x.shape[-1]
    added = x.data_ptr()
    if residual is None and x.dtype != weight.dtype:  # the residual itself
        residual, added = x, 0
    native.norm(
        DTYPES[weight.dtype],
        added,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        DTYPES[x.dtype if residual is None else residual.dtype],
        out.data_ptr(),
        x.numel() // size,
        size,
        eps,
        is_centred,
    )
    return out


def add(residual: Tensor, x: Tensor) -> None:
    """Add x to the residual stream in place: `rms_norm`'s addition alone.

    residual  x's shape, in its dtype or in float32
    """
    residual.add_(x)


def add_native(residual: Tensor, x: Tensor) -> None:
    """`add` by compiled code, so that a step that adds can be recorded."""
    if native is None or not takes(x) or not takes(residual):
        add(residual, x)
        return
    size = x.shape[-1]
    numbers = x.numel() // size, size, 0.0, False
    native.norm(DTYPES[x.dtype], x.data_ptr(), 0, 0, residual.data_ptr(), DTYPES[residual.dtype], 0, *numbers)
