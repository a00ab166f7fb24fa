"""Rounding of whole weights to 4 bits: the reference, compiled code against it, and what both gain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels.grouped_weight import INT4, GroupedWeight
from pagoda_server.kernels.quantize_int4 import quantize_int4, quantize_int4_native

Quantize = Callable[[Tensor], GroupedWeight]
both = pytest.mark.parametrize("quantize", [quantize_int4, quantize_int4_native])


def squared_error(weight: Tensor, packed: GroupedWeight) -> float:
    return (packed.dequantize() - weight.float()).square().sum().item()


def from_least_to_greatest(weight: Tensor) -> GroupedWeight:
    """Round with the scale and the minimum that a group's least and greatest values give."""
    groups = weight.float().unflatten(1, (-1, INT4.group))
    least = groups.amin(dim=-1, keepdim=True)
    scales, minimums = ((groups.amax(dim=-1, keepdim=True) - least) / 15).half(), least.half()
    codes = ((groups - minimums.float()) / scales.float()).round().clamp(0, 15).to(torch.uint8)
    first, second = codes.chunk(2, dim=-1)
    return GroupedWeight.of_parts(INT4, first | second << 4, scales.squeeze(-1), minimums.squeeze(-1))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_less_than_that_of_the_whole_range(quantize: Quantize, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(64, 512) * 0.05).to(dtype)
    assert squared_error(weight, quantize(weight)) < 0.9 * squared_error(weight, from_least_to_greatest(weight))


@both
def test_few_values_are_kept(quantize: Quantize) -> None:
    """Groups of 16 values at equal distances, of one value, and of zeros."""
    steps = torch.arange(16.0).repeat(2) / 8 - 1
    weight = torch.stack([steps, torch.full_like(steps, -1.5), torch.zeros_like(steps)])
    torch.testing.assert_close(quantize(weight).dequantize(), weight, atol=1e-3, rtol=0)


@both
def test_a_group_depends_on_no_other(quantize: Quantize) -> None:
    torch.manual_seed(1)
    weight = torch.randn(7, 96)
    whole = quantize(weight)
    for row in range(7):
        alone = quantize(weight[row : row + 1].clone())
        assert torch.equal(alone.values, whole.values[row : row + 1])
        assert torch.equal(alone.scales, whole.scales[row : row + 1])


@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_rounds_as_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    weight = (torch.randn(300, 160) * torch.logspace(-4, 1, 300)[:, None]).to(dtype)
    weight[5, 32:64], weight[6] = 0, 0.75
    expected, packed = quantize_int4(weight), quantize_int4_native(weight)
    assert (packed.values == expected.values).float().mean() > 0.99
    for row in range(300):
        of_row = squared_error(weight[row], packed.rows(torch.tensor([row])))
        # Where two ranges are about equally good, sums in another order may choose the other one.
        assert of_row <= 1.02 * squared_error(weight[row], expected.rows(torch.tensor([row])))
