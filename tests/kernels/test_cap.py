"""The soft cap of logits, near 0 and far beyond the cap."""

from __future__ import annotations

import pytest
import torch

from pagoda_server.kernels.backend import Backend
from tests.kernels.backends import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 37, 4099])
def test_numbers_are_capped(backend: Backend, dtype: torch.dtype, size: int) -> None:
    x = torch.randn(3, size).to(dtype) * 10 ** torch.randint(-3, 3, (3, size))
    x[:, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    expected = 30 * (x.double() / 30).tanh()
    backend.cap(x, 30.0)
    torch.testing.assert_close(x, expected.to(dtype), equal_nan=True)
    assert x[:2, 0].tolist() == [30, -30]
