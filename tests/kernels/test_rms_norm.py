from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pagoda_server.kernels.backend import REFERENCE, Backend
from tests.kernels.backends import BACKENDS

SHAPES = [(1, 1), (3, 7), (5, 48), (2, 3, 17), (1, 576)]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_divides_by_the_root_mean_square(backend: Backend, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    exact = x.double()
    expected = exact / (exact.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(backend.rms_norm(x, weight, 1e-5), expected.float())


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_adds_to_the_residual_before_it_normalises(backend: Backend, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 33, dtype=torch.float64).to(dtype)
    weight = torch.randn(33).to(dtype)
    summed = x + residual
    normalised = backend.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(residual, summed)
    torch.testing.assert_close(normalised, REFERENCE.rms_norm(summed, weight, 1e-6))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_rms_norm_takes_its_mean_in_float32(backend: Backend) -> None:
    x = torch.full((1, 4096), 300.0, dtype=torch.bfloat16)  # the sum of squares needs more than bfloat16's 8 bits
    weight = torch.ones(4096, dtype=torch.bfloat16)
    assert torch.equal(backend.rms_norm(x, weight, 0.0), torch.ones_like(x))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_rms_norm_of_a_strided_view_leaves_its_input_alone(backend: Backend) -> None:
    whole = torch.randn(4, 6, 8)
    before = whole.clone()
    part = whole[:, 1:3]
    torch.testing.assert_close(
        backend.rms_norm(part, torch.ones(8), 1e-6), REFERENCE.rms_norm(part.contiguous(), torch.ones(8), 1e-6)
    )
    assert torch.equal(whole, before)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("wide", "narrow"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (40, 576)])
def test_an_addition_alone_changes_the_residual_only(
    backend: Backend, wide: torch.dtype, narrow: torch.dtype, shape: tuple[int, ...]
) -> None:
    residual, x = torch.randn(shape).to(wide), torch.randn(shape).to(narrow)
    expected, before = residual + x, x.clone()
    backend.add(residual, x)
    assert torch.equal(residual, expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_subtracts_the_mean_and_divides_by_the_deviation(
    backend: Backend, shape: tuple[int, ...], has_bias: bool
) -> None:
    x, weight = torch.randn(shape) + 3, torch.randn(shape[-1])
    bias = torch.randn(shape[-1]) if has_bias else None
    exact = x.double() - x.double().mean(dim=-1, keepdim=True)
    expected = exact / (exact.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight
    expected = expected if bias is None else expected + bias
    torch.testing.assert_close(backend.layer_norm(x, weight, bias, 1e-5), expected.float(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_layer_norm_adds_to_the_residual_and_keeps_the_weights_dtype(backend: Backend, wide: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((5, 33), (33,), (33,)))
    residual = torch.randn(5, 33).to(wide) + 100  # so that the squares' mean would lose the variance
    summed = residual + x
    normalised = backend.layer_norm(x, weight, bias, 1e-6, residual)
    assert torch.equal(residual, summed)
    assert normalised.dtype == torch.bfloat16
    expected = functional.layer_norm(summed.double(), (33,), weight.double(), bias.double(), 1e-6)
    torch.testing.assert_close(normalised.double(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(backend.layer_norm(summed, weight, bias, 1e-6), normalised)
