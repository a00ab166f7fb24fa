"""Root mean square normalisation, with the addition to the residual stream that comes before it in a decoder."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.native_module import DTYPES, native, takes
from kernels.recording import empty


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich, 2019).

    x         [..., size]
    weight    [size], x's dtype
    residual  x's shape and dtype; if given it is first increased by x, in place, and it is what is normalised
    return    x's shape and dtype; a new tensor

    The mean is taken in float32.
    """
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """`rms_norm` by torch's own kernel."""
    if residual is not None:
        x = residual.add_(x)
    return functional.rms_norm(x, weight.shape, weight, eps)


def rms_norm_native(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """`rms_norm` and the addition in one pass."""
    if native is None or not takes(x):
        return rms_norm_cpu(x, weight, eps, residual)
    out = empty(*x.shape, dtype=x.dtype)
    size = x.shape[-1]
    native.rms_norm(
        DTYPES[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        out.data_ptr(),
        x.numel() // size,
        size,
        eps,
    )
    return out
