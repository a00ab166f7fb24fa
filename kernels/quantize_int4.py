"""Rounding of weights to 4 bits, for checkpoints that hold them whole: reference and compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

from .grouped_weight import INT4, GroupedWeight
from .native_module import DTYPES, native, takes

# How many steps longer than 15 each range is, as in native/quantize_int4.h. None puts a group's least or greatest value
# halfway between two codes, where a last bit would decide.
_RANGES = (0.0, -0.5, 0.5, -0.9, 1.0, -1.5, -2.5)
_MOST = 15


def quantize_int4(weight: Tensor) -> GroupedWeight:
    """Round a matrix to 4 bits with a scale and a minimum for every 32 inputs of an output.

    weight  [out, in] floating point on the host; `in` is a multiple of 32

    Several ranges are tried, some shorter and some longer than from a group's least to its greatest value. Each gives
    codes, and least squares gives the scale and the minimum that fit them best. The range with the least error is kept:
    one that leaves an outlier out may serve the other values better.
    """
    groups = weight.float().unflatten(1, (-1, INT4.group))
    low = groups.amin(dim=-1, keepdim=True)
    above = groups - low  # squares are summed from the least value, so that they lose little
    extent = above.amax(dim=-1, keepdim=True)
    scale, minimum = torch.zeros_like(low), low.clone()
    fewest = torch.full_like(low, torch.inf)
    for more in _RANGES:
        codes = _nearest(above * torch.where(extent > 0, (_MOST + more) / extent, 0.0) - more / 2)
        middle, code_middle = above.mean(dim=-1, keepdim=True), codes.mean(dim=-1, keepdim=True)
        spread = (codes - code_middle).square().mean(dim=-1, keepdim=True)
        covariance = ((codes - code_middle) * above).mean(dim=-1, keepdim=True)
        step = torch.where(spread > 0, covariance / spread, 0.0)
        offset = middle - step * code_middle
        error = (above - step * codes - offset).square().sum(dim=-1, keepdim=True)
        is_better = (error < fewest) & (spread > 0)
        fewest = error.where(is_better, fewest)
        scale, minimum = step.where(is_better, scale), (low + offset).where(is_better, minimum)
    scales, minimums = scale.half(), minimum.half()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    first, second = _nearest((groups - minimums.float()) * inverse).to(torch.uint8).chunk(2, dim=-1)
    return GroupedWeight.of_parts(INT4, first | second << 4, scales.squeeze(-1), minimums.squeeze(-1))


def _nearest(values: Tensor) -> Tensor:
    return values.clamp(0, _MOST).round()


def quantize_int4_native(weight: Tensor) -> GroupedWeight:
    """`quantize_int4` by compiled code. Where two ranges have nearly the same error, it may choose the other one."""
    if native is None or not takes(weight):
        return quantize_int4(weight)
    packed = GroupedWeight.allocate(INT4, *weight.shape)
    assert packed.minimums is not None
    parts = packed.values.data_ptr(), packed.scales.data_ptr(), packed.minimums.data_ptr()
    native.quantize_int4(DTYPES[weight.dtype], weight.data_ptr(), *parts, packed.scales.numel())
    return packed
