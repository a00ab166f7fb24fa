"""Products with 4-bit weights: compiled code against the reference, and the error against the unquantized product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels.gate_and_mul import gate_and_mul
from pagoda_server.kernels.linear_int4 import (
    WEIGHT_GROUP,
    Int4Weight,
    linear_int4,
    linear_int4_native,
)
from pagoda_server.kernels.linear_int8 import quantize_rows
from tests.kernels.products import gated

compiled = pytest.mark.usefixtures("each_instruction_set")


def random_weight(out_size: int, in_size: int) -> Int4Weight:
    weight = Int4Weight.allocate(out_size, in_size)
    weight.values.random_(0, 256)
    weight.scales.normal_(0, 0.2)  # of either sign, as files have them
    weight.minimums.normal_(-1, 0.5)
    return weight


def restored(x: Tensor) -> Tensor:
    """The activations after quantization, in float64."""
    values, scales, least = (part.double() for part in quantize_rows(x))
    return (values * scales[..., None] + least[..., None]).flatten(1)[:, : x.shape[1]]


def test_a_group_holds_its_first_half_in_low_nibbles() -> None:
    weight = Int4Weight(
        torch.full((1, 1, 16), 0xA3, dtype=torch.uint8),
        torch.tensor([[0.5]], dtype=torch.float16),
        torch.tensor([[-4.0]], dtype=torch.float16),
    )
    assert weight.shape == (1, 32)
    assert weight.dequantize().tolist() == [[-2.5] * 16 + [1.0] * 16]


def test_rows_split_off_are_views() -> None:
    weight = random_weight(6, 64)
    upper, lower = weight.split([2, 4])
    assert torch.equal(lower.dequantize(), weight.dequantize()[2:])
    lower.copy_(random_weight(4, 64))
    assert torch.equal(lower.dequantize(), weight.dequantize()[2:])
    assert upper.nbytes + lower.nbytes == weight.nbytes == 6 * 2 * (16 + 2 + 2)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("in_size", "out_size"), [(32, 1), (64, 32), (96, 29), (576, 100), (1536, 7)])
def test_only_activations_are_rounded(in_size: int, out_size: int, has_bias: bool) -> None:
    weight, x = random_weight(out_size, in_size), torch.randn(5, in_size) + 1
    bias = torch.randn(out_size) if has_bias else None
    exact = restored(x) @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(linear_int4(weight, bias)(x).double(), exact, atol=1e-3, rtol=1e-5)


def test_what_is_gated_is_rounded_once() -> None:
    weight, x = random_weight(20, 96), torch.randn(5, 192).bfloat16()
    exact = restored(gate_and_mul(x.float())) @ weight.dequantize().double().T
    product = gated(linear_int4)(weight, None)(x)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), exact, atol=1e-3, rtol=0.004)


def test_one_row_does_not_touch_the_precision_of_another() -> None:
    weight, x = random_weight(40, 128), torch.randn(3, 128)
    alone = linear_int4(weight, None)(x[1:2])
    x[0] *= 1e6
    assert torch.equal(linear_int4(weight, None)(x)[1:2], alone)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 32), (32, 29), (576, 100), (96, 576)])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 33, 97, 200])
def test_compiled_products_are_those_of_the_reference(
    dtype: torch.dtype, has_bias: bool, in_size: int, out_size: int, rows: int
) -> None:
    x, weight = torch.randn(rows, in_size).to(dtype), random_weight(out_size, in_size)
    bias = torch.randn(out_size).to(dtype) if has_bias else None
    product, expected = linear_int4_native(weight, bias)(x), linear_int4(weight, bias)(x)
    assert product.dtype == dtype
    # A value half-way between two steps may be rounded to either, which changes a product by a step times a weight.
    # The sums of a group's values, which are multiplied by the least of its activations, are packed in fp16.
    tolerance = 1e-3 if dtype == torch.float32 else 0.01
    assert (product - expected).abs().mean() <= tolerance * in_size**0.5 or rows == 0
    torch.testing.assert_close(product, expected, atol=0.5, rtol=tolerance)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_size", [32, 64, 96, 576])
@pytest.mark.parametrize("rows", [0, 1, 9, 97])
def test_compiled_gated_products_are_those_of_the_reference(dtype: torch.dtype, in_size: int, rows: int) -> None:
    x, weight = torch.randn(rows, 2 * in_size).to(dtype), random_weight(40, in_size)
    product, expected = gated(linear_int4_native)(weight, None)(x), gated(linear_int4)(weight, None)(x)
    tolerance = 1e-4 if dtype == torch.float32 else 0.01  # a value between two steps may be rounded to either
    torch.testing.assert_close(product, expected, atol=0.04 * in_size**0.5, rtol=tolerance)


@compiled
def test_a_compiled_row_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight = torch.randn(203, 192).bfloat16(), random_weight(70, 192)
    product = linear_int4_native(weight, None)
    together = product(x)
    for rows in (1, 2, 5, 8, 31, 100):
        assert torch.equal(product(x[:rows]), together[:rows])
    assert torch.equal(product(x[100:101]), together[100:101])


@compiled
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_gives_nan_and_leaves_the_others_alone(poison: float) -> None:
    x, weight = torch.randn(20, 3 * WEIGHT_GROUP), random_weight(40, 3 * WEIGHT_GROUP)
    product = linear_int4_native(weight, None)
    clean = product(x)
    x[3, -1] = poison
    broken = product(x)
    assert broken.isnan().all(dim=1).tolist() == [row == 3 for row in range(20)]
    kept = torch.arange(20) != 3
    assert torch.equal(broken[kept], clean[kept])
