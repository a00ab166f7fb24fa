"""Products whose sums have a fixed order: the same bits for a row in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels import GATED, load_backend
from pagoda_server.kernels.triton import linear_fixed
from tests.kernels.triton.device import DEVICE, compute_each_element_alone

pytestmark = pytest.mark.simulated

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_fixed, "SPLIT_INPUTS", 64)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize(
    ("weights", "dtype", "processors"),
    [("unquantized", torch.float32, 1), ("int8-weight", torch.bfloat16, 100), ("fp8", torch.bfloat16, 1)],
)
def test_products_are_those_of_the_reference(
    weights: str, dtype: torch.dtype, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_fixed, "num_processors", lambda _: processors)
    ops, reference = load_backend("triton", weights, True), load_backend("reference", weights)
    for rows, in_size, out_size in ((0, 16, 16), (1, 200, 33), (70, 70, 140)):
        weight, bias = random(out_size, in_size, dtype=dtype) * in_size**-0.5, random(out_size, dtype=dtype)
        x, gate_up = random(rows, in_size, dtype=dtype), random(rows, 2 * in_size, dtype=dtype)
        for found, expected in (
            (ops.linear(weight, bias)(x), reference.linear(weight, bias)(x)),
            (ops.linear(weight, None, GATED)(gate_up), reference.linear(weight, None, GATED)(gate_up)),
        ):
            assert found.dtype == dtype
            torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [("unquantized", torch.float32), ("unquantized", torch.bfloat16), ("int8-weight", torch.bfloat16)],
)
def test_a_row_has_the_same_bits_in_every_batch_whichever_programs_add_up_its_splits(
    weights: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_each_element_alone(monkeypatch)
    weight, bias = random(70, 150, dtype=dtype), random(70, dtype=dtype)
    product, x = load_backend("triton", weights, True).linear(weight, bias), random(75, 150, dtype=dtype)
    together = product(x)
    for processors in (1, 100):
        monkeypatch.setattr(linear_fixed, "num_processors", lambda _, count=processors: count)
        for rows in (slice(0, 1), slice(74, 75), slice(3, 12), slice(60, 75)):
            assert torch.equal(product(x[rows]), together[rows])
