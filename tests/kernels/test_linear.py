from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pagoda_server.kernels.backend import CPU, Backend
from pagoda_server.kernels.linear import GATED
from tests.kernels.backends import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 33])
def test_linear_multiplies_by_the_transposed_weight(
    backend: Backend, dtype: torch.dtype, has_bias: bool, rows: int
) -> None:
    x, weight = torch.randn(rows, 17).to(dtype), torch.randn(29, 17).to(dtype)
    bias = torch.randn(29).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    product = backend.linear(weight, bias)(x)
    assert product.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_row_of_a_bfloat16_product_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight = torch.randn(33, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    product = CPU.linear(weight, None)
    together = product(x)
    for rows in (1, 2, 8, 17):
        assert torch.equal(product(x[:rows]), together[:rows])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's account of memory")
def test_products_of_all_numbers_of_rows_keep_little_memory() -> None:
    product = CPU.linear(torch.randn(61, 67), None)
    before = _anonymous_bytes()
    for rows in range(1, 257):
        product(torch.randn(rows, 67))
    assert _anonymous_bytes() - before < 60e6  # 120 MB if oneDNN compiles code for each number of rows


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_product_is_the_product_of_what_is_gated(backend: Backend, dtype: torch.dtype) -> None:
    gate_up, weight = torch.randn(7, 2 * 24).to(dtype), torch.randn(19, 24).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = (gate * torch.sigmoid(gate) * up) @ weight.double().T
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    product = backend.linear(weight, None, GATED)(gate_up)
    torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=tolerance)
