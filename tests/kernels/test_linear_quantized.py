"""Weights in int8 and float8: their error, and their products against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels import Linear
from pagoda_server.kernels.linear import linear
from pagoda_server.kernels.linear_quantized import (
    linear_fp8_weight,
    linear_int8_weight,
    quantize_to_fp8,
    quantize_to_int8,
)
from tests.kernels.products import gated

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
FORMATS = [
    pytest.param(quantize_to_int8, linear_int8_weight, gated(linear_int8_weight), id="int8"),
    pytest.param(quantize_to_fp8, linear_fp8_weight, gated(linear_fp8_weight), id="fp8"),
]


def test_int8_is_within_half_a_step_of_the_weight() -> None:
    weight = torch.randn(5, 300) * torch.logspace(-3, 3, 5)[:, None]
    values, scales = quantize_to_int8(weight)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (5,))
    assert values.int().abs().amax(dim=1).tolist() == [127] * 5
    assert ((values * scales[:, None] - weight).abs() <= scales[:, None] * 0.501).all()


def test_fp8_keeps_four_significant_bits_of_every_weight_that_is_not_far_below_the_greatest() -> None:
    weight = torch.randn(5, 300) * torch.logspace(-3, 3, 5)[:, None]
    values, scales = quantize_to_fp8(weight)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (5,))
    assert values.float().abs().amax(dim=1).tolist() == [448] * 5
    error = (values.float() * scales[:, None] - weight).abs()
    assert (error <= (weight.abs() / 16).maximum(scales[:, None] * 2**-10) * 1.001).all()


@pytest.mark.parametrize(("quantize", "linear_op", "gated_op"), FORMATS)
def test_an_output_of_zeros_stays_zero(quantize: Quantize, linear_op: object, gated_op: object) -> None:
    weight = torch.randn(3, 16)
    weight[1] = 0
    values, scales = quantize(weight)
    assert scales[1] == 1
    assert (values[1].float() == 0).all()


@pytest.mark.parametrize(("quantize", "linear_op", "gated_op"), FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_the_weight_that_the_values_and_scales_stand_for(
    quantize: Quantize,
    linear_op: Callable[[Tensor, Tensor | None], Linear],
    gated_op: Callable[[Tensor, Tensor | None], Linear],
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    weight, x, gate_up = torch.randn(19, 40).to(dtype), torch.randn(7, 40).to(dtype), torch.randn(7, 80).to(dtype)
    bias = torch.randn(19).to(dtype) if has_bias else None
    values, scales = quantize(weight)
    restored = (values.double() if values.dtype == torch.int8 else values.float()) * scales[:, None]
    for op, whole, rows in ((linear_op, linear, x), (gated_op, gated(linear), gate_up)):
        expected = whole(restored.double(), None if bias is None else bias.double())(rows.double())
        product = op(weight, bias)(rows)
        assert product.dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("linear_op", "most"), [(linear_int8_weight, 0.01), (linear_fp8_weight, 0.03)])
def test_the_error_of_a_product_is_that_of_the_rounding(
    linear_op: Callable[[Tensor, Tensor | None], Linear], most: float
) -> None:
    x, weight = torch.randn(64, 576), torch.randn(128, 576)
    product, exact = linear_op(weight, None)(x), x @ weight.T
    assert (product - exact).norm() / exact.norm() < most
