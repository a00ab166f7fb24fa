"""Normalization on a GPU: each program reads one row once and keeps it in registers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import tuned
from .dependent_launch import await_previous, dependent_launch


@dataclass(frozen=True, slots=True)
class Config:
    num_warps: int


def default_config(size: int) -> Config:
    """Eight elements a thread, so that loads have 16 bytes and as many as possible are in flight."""
    return Config(num_warps=min(max(triton.next_power_of_2(size) // 256, 1), 16))


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """`rms_norm` and the addition in one pass. `residual` must be contiguous, and `weight` a constant."""
    return _launch(x, weight, None, eps, residual, is_centred=False)


def layer_norm_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    """`layer_norm` and the addition in one pass. `residual` must be contiguous, `weight` and `bias` constants."""
    return _launch(x, weight, bias, eps, residual, is_centred=True)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, *, is_centred: bool
) -> Tensor:
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        config = tuned("rms_norm", f"{size}", default_config(size))
        _norm[(len(rows),)](
            rows,
            rows.stride(0),
            weight,
            bias,
            rows if residual is None else residual.view(-1, size),
            out,
            eps,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            HAS_RESIDUAL=residual is not None,
            IS_CENTRED=is_centred,
            num_warps=config.num_warps,
            **dependent_launch(),
        )
    return out


@triton.jit
def _norm(
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)  # a constant
    await_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if HAS_RESIDUAL:
        places = residual_ptr + row * SIZE + columns
        total = (x + tl.load(places, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(places, total, mask=inside)
        x = total.to(tl.float32)
    if IS_CENTRED:
        x = tl.where(inside, x - tl.sum(x, axis=0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    normalised = x * scale
    if not IS_CENTRED:
        normalised = normalised.to(dtype).to(tl.float32)  # rounded where the reference rounds
    normalised *= weight
    if bias_ptr is not None:
        normalised += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, normalised.to(dtype), mask=inside)
