from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pagoda_server.kernels.rms_norm import layer_norm, rms_norm
from pagoda_server.kernels.triton.rms_norm import layer_norm_triton, rms_norm_triton
from tests.kernels.triton.device import DEVICE

pytestmark = pytest.mark.simulated

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 576), (2, 3, 80), (2, 4096), (1, 16384), (0, 64)])
def test_rows_are_divided_by_their_root_mean_square(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, device=DEVICE) * 5).to(dtype)
    weight = torch.randn(shape[-1], device=DEVICE).to(dtype)
    exact = x.double()
    expected = exact / (exact.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normalised = rms_norm_triton(x, weight, 1e-5)
    assert normalised.dtype == dtype
    torch.testing.assert_close(normalised.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("size", [33, 576])
def test_the_residual_is_increased_and_normalised_as_the_reference_does(size: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, size, device=DEVICE).to(dtype)
    weight = torch.randn(size, device=DEVICE).to(dtype)
    expected_residual = residual.clone()
    expected = rms_norm(x, weight, 1e-6, expected_residual)
    before = x.clone()
    normalised = rms_norm_triton(x, weight, 1e-6, residual)
    step = 2**-7 if dtype == torch.bfloat16 else 0.0  # the interpreter truncates to bfloat16 instead of rounding
    torch.testing.assert_close(residual, expected_residual, atol=0.0, rtol=step)
    assert torch.equal(x, before)
    torch.testing.assert_close(normalised, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_the_mean_is_taken_in_float32() -> None:
    weight = torch.ones(4096, dtype=torch.bfloat16, device=DEVICE)  # first: the kernel takes it for a constant
    x = torch.full((1, 4096), 300.0, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(rms_norm_triton(x, weight, 0.0), torch.ones_like(x))


def test_a_strided_view_is_left_alone() -> None:
    weight, whole = torch.ones(8, device=DEVICE), torch.randn(4, 6, 8, device=DEVICE)
    before = whole.clone()
    part = whole[:, 1:3]
    torch.testing.assert_close(rms_norm_triton(part, weight, 1e-6), rms_norm(part, weight, 1e-6))
    assert torch.equal(whole, before)


def test_a_broken_row_spoils_no_other() -> None:
    x, weight = torch.randn(3, 100, device=DEVICE), torch.ones(100, device=DEVICE)
    x[1, 99] = torch.nan
    normalised = rms_norm_triton(x, weight, 1e-6)
    assert normalised.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 576), (2, 3, 80), (0, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_mean_is_subtracted_as_the_reference_does(
    shape: tuple[int, ...], dtype: torch.dtype, has_bias: bool
) -> None:
    x, residual = (torch.randn(2, *shape, device=DEVICE) * 5 + 3).to(dtype)
    weight, bias = torch.randn(2, shape[-1], device=DEVICE).to(dtype)
    optional, expected_residual = bias if has_bias else None, residual.clone()
    expected = layer_norm(x, weight, optional, 1e-5, expected_residual)
    normalised = layer_norm_triton(x, weight, optional, 1e-5, residual)
    step = 2**-7 if dtype == torch.bfloat16 else 0.0  # the interpreter truncates to bfloat16 instead of rounding
    torch.testing.assert_close(residual, expected_residual, atol=0.0, rtol=step)
    torch.testing.assert_close(normalised, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    exact = functional.layer_norm(x.double(), (shape[-1],), weight.double(), None, 1e-5)
    exact = exact + bias.double() if has_bias else exact
    alone = layer_norm_triton(x, weight, optional, 1e-5).double()
    torch.testing.assert_close(alone, exact, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
