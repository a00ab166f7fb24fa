"""Products with unquantized weights by compiled code."""

from __future__ import annotations

import pytest
import torch

from pagoda_server.kernels.activate import SWIGLU, activate
from pagoda_server.kernels.linear import HEAD, linear_whole_native
from tests.kernels.products import gated

pytestmark = pytest.mark.usefixtures("each_instruction_set")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 32), (17, 29), (576, 100), (1, 1)])
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 12, 13, 49, 130])
def test_products_are_those_in_float64(
    dtype: torch.dtype, has_bias: bool, in_size: int, out_size: int, rows: int
) -> None:
    x, weight = torch.randn(rows, in_size).to(dtype), torch.randn(out_size, in_size).to(dtype)
    bias = torch.randn(out_size).to(dtype) if has_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    product = linear_whole_native(weight, bias)(x)
    assert product.dtype == dtype
    torch.testing.assert_close(product.double(), exact, atol=1e-4, rtol=1e-5 if dtype == torch.float32 else 0.004)
    wide = linear_whole_native(weight, bias, HEAD)(x)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7])
def test_what_is_gated_is_not_rounded_before_it_is_multiplied(dtype: torch.dtype, rows: int) -> None:
    x, weight = torch.randn(rows, 2 * 100).to(dtype), torch.randn(40, 100).to(dtype)
    exact = activate(x.double(), SWIGLU) @ weight.double().T
    product = gated(linear_whole_native)(weight, None)(x)
    torch.testing.assert_close(product.double(), exact, atol=1e-4, rtol=1e-5 if dtype == torch.float32 else 0.004)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight = torch.randn(130, 192).bfloat16(), torch.randn(70, 192).bfloat16()
    product = linear_whole_native(weight, None)
    together = product(x)
    for rows in (1, 2, 5, 8, 49, 100):
        assert torch.equal(product(x[:rows]), together[:rows])
