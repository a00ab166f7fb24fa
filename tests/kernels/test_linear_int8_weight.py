"""Products of int8 weights by the matrix unit of AMX: their values, and that rows and torch do not affect them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pagoda_server.kernels.activate import SWIGLU, activate
from pagoda_server.kernels.linear_quantized import (
    has_native_int8_weight,
    linear_int8_weight,
    linear_int8_weight_native,
)
from tests.kernels.products import gated

pytestmark = pytest.mark.skipif(
    not has_native_int8_weight(), reason="needs a processor with AMX for bfloat16, and compiled code"
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def tolerance(dtype: torch.dtype) -> float:
    """The tolerance for sums of products of normal numbers, which grows with the square root of their count."""
    return 1e-5 if dtype == torch.float32 else 0.01


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("in_size", "out_size"), [(32, 32), (64, 16), (17, 29), (576, 100), (100, 576), (1536, 40)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 15, 16, 17, 32, 33, 49, 97, 300])
def test_products_are_those_of_the_reference(
    dtype: torch.dtype, has_bias: bool, in_size: int, out_size: int, rows: int
) -> None:
    x, weight = torch.randn(rows, in_size).to(dtype), torch.randn(out_size, in_size).to(dtype)
    bias = torch.randn(out_size).to(dtype) if has_bias else None
    product = linear_int8_weight_native(weight, bias)(x)
    expected = linear_int8_weight(weight, bias)(x.bfloat16().to(dtype))
    assert product.dtype == dtype
    torch.testing.assert_close(product, expected, atol=tolerance(dtype) * in_size**0.5, rtol=tolerance(dtype))


@DTYPES
@pytest.mark.parametrize("in_size", [64, 17, 576, 100])
@pytest.mark.parametrize("rows", [0, 1, 9, 97])
def test_gated_products_are_those_of_the_reference(dtype: torch.dtype, in_size: int, rows: int) -> None:
    x, weight = torch.randn(rows, 2 * in_size).to(dtype), torch.randn(40, in_size).to(dtype)
    product = gated(linear_int8_weight_native)(weight, None)(x)
    # Gated activations are rounded to bfloat16, to either side if they are half-way.
    once = linear_int8_weight(weight, None)(activate(x.float(), SWIGLU).bfloat16().to(dtype))
    torch.testing.assert_close(product, once, atol=0.002 * in_size**0.5, rtol=0.01)
    torch.testing.assert_close(product, gated(linear_int8_weight)(weight, None)(x), atol=0.02 * in_size**0.5, rtol=0.02)


@DTYPES
@pytest.mark.parametrize("in_size", [192, 1536, 100])
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype, in_size: int) -> None:
    x, weight = (3 * torch.randn(603, in_size)).to(dtype), torch.randn(70, in_size).to(dtype)
    product = linear_int8_weight_native(weight, None)
    together = product(x)
    for rows in (1, 2, 3, 5, 16, 17, 31, 32, 33, 100, 256, 257):
        assert torch.equal(product(x[:rows]), together[:rows]), rows
    for row in (1, 100, 602):
        assert torch.equal(product(x[row : row + 1]), together[row : row + 1]), row


@pytest.mark.parametrize("rows", [2, 20, 40])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_is_never_finite_and_leaves_the_others_alone(rows: int, poison: float) -> None:
    x, weight = torch.randn(rows, 130), torch.randn(40, 130)
    product = linear_int8_weight_native(weight, None)
    clean = product(x)
    x[1, 129] = poison
    broken = product(x)
    kept = torch.arange(rows) != 1
    assert torch.equal(broken[kept], clean[kept])
    assert not broken[1].isfinite().any()


def test_ops_called_from_several_threads_take_turns() -> None:
    x, weight = torch.randn(50, 576).bfloat16(), torch.randn(300, 576).bfloat16()
    product = linear_int8_weight_native(weight, None)
    expected = product(x)

    def is_right(_: int) -> bool:
        return all(torch.equal(product(x[: rows + 1]), expected[: rows + 1]) for rows in range(50))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, range(8)))


def test_torch_can_use_the_unit_in_between() -> None:
    """torch's own products of bfloat16 use it on the thread that ours run on."""
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(256, 256).bfloat16()
    product = linear_int8_weight_native(weight, None)
    ours, theirs = product(x), x @ weight
    for _ in range(20):
        assert torch.equal(x @ weight, theirs)
        assert torch.equal(product(x), ours)
