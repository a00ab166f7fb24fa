"""The kernel that multiplies a few rows by a large weight, and when it is chosen."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels.activate import SWIGLU, Activation
from pagoda_server.kernels.linear import linear
from pagoda_server.kernels.triton.linear import linear_triton
from pagoda_server.kernels.triton.product import Config, Weight, bucket, multiply
from tests.kernels.products import gated
from tests.kernels.triton.device import DEVICE

pytestmark = pytest.mark.simulated

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}


def config(rows: int = 16, inputs: int = 32, splits: int = 1) -> Config:
    return Config(rows=rows, outputs=32, inputs=inputs, splits=splits, num_warps=4, num_stages=2)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "in_size", "out_size", "splits"),
    [(1, 64, 32, 1), (1, 1, 1, 1), (3, 17, 29, 1), (5, 130, 70, 3), (20, 96, 48, 2), (16, 32, 40, 5), (0, 8, 8, 2)],
)
def test_rows_are_multiplied_by_the_transposed_weight(
    dtype: torch.dtype, has_bias: bool, is_gated: bool, rows: int, in_size: int, out_size: int, splits: int
) -> None:
    x = random(rows, in_size * (2 if is_gated else 1), dtype=dtype)
    weight, bias = random(out_size, in_size, dtype=dtype), random(out_size, dtype=dtype) if has_bias else None
    whole = (gated(linear) if is_gated else linear)(weight.double(), None if bias is None else bias.double())
    result = multiply(x, Weight(weight), bias, config(splits=splits), activation=SWIGLU if is_gated else None)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), whole(x.double()), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_float32_is_multiplied_without_rounding_its_mantissa() -> None:
    x, weight = random(4, 256), random(40, 256)
    exact = x.double() @ weight.double().T
    assert (multiply(x, Weight(weight), None, config(splits=2)).double() - exact).norm() / exact.norm() < 1e-6


def test_a_broken_row_spoils_no_other() -> None:
    x, weight = random(5, 70), random(33, 70)
    x[3, 69] = torch.nan
    result = multiply(x, Weight(weight), None, config(splits=2))
    assert result.isnan().all(dim=1).tolist() == [row == 3 for row in range(5)]
    assert result.isnan().any(dim=1).tolist() == [row == 3 for row in range(5)]


def test_a_product_is_the_same_in_every_run_and_in_every_batch_of_a_configuration() -> None:
    x, weight = random(16, 200), random(33, 200)
    together = multiply(x, Weight(weight), None, config(splits=4))
    for rows in (1, 2, 9, 16):
        assert torch.equal(multiply(x[:rows], Weight(weight), None, config(splits=4)), together[:rows])


def test_the_library_multiplies_where_nothing_was_measured(
    table: dict[str, dict[str, dict[str, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pagoda_server.kernels.triton.linear.multiply", lambda *_, **__: pytest.fail("a kernel was launched")
    )
    weight, bias = random(24, 40), random(24)
    for rows in (0, 1, 7, 100):
        x, gate_up = random(rows, 40), random(rows, 80)
        torch.testing.assert_close(linear_triton(weight, bias)(x), linear(weight, bias)(x))
        torch.testing.assert_close(gated(linear_triton)(weight, bias)(gate_up), gated(linear)(weight, bias)(gate_up))


def test_the_kernel_multiplies_where_it_was_measured_to_be_faster(
    table: dict[str, dict[str, dict[str, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[tuple[int, Config, bool]] = []

    def noting(
        x: Tensor, weight: Weight, bias: Tensor | None, config: Config, *, activation: Activation | None = None
    ) -> Tensor:
        chosen.append((len(x), config, activation is not None))
        return multiply(x, weight, bias, config, activation=activation)

    monkeypatch.setattr("pagoda_server.kernels.triton.linear.multiply", noting)
    one, many, fused = config(splits=2), config(rows=32), config(inputs=64)
    table["linear"] = {"1x40x24 float32": asdict(one), "32x40x24 float32": asdict(many)}
    table["gated_linear"] = {"16x40x24 float32": asdict(fused)}
    weight, bias = random(24, 40), random(24)
    for rows in (1, 2, 16, 17, 32, 33, 64, 65):
        x, gate_up = random(rows, 40), random(rows, 80)
        torch.testing.assert_close(linear_triton(weight, bias)(x), linear(weight, bias)(x))
        torch.testing.assert_close(gated(linear_triton)(weight, bias)(gate_up), gated(linear)(weight, bias)(gate_up))
    # A gate that is not fused runs before whatever would multiply the same rows ungated.
    assert [entry for entry in chosen if not entry[2]] == [
        *[(1, one, False)] * 2,
        *[(17, many, False)] * 2,
        *[(32, many, False)] * 2,
    ]
    assert [entry for entry in chosen if entry[2]] == [(2, fused, True), (16, fused, True)]


def test_a_configuration_serves_batches_up_to_the_one_it_was_measured_at() -> None:
    assert [bucket(rows) for rows in (0, 1, 2, 16, 17, 64, 65, 1024, 5000)] == [1, 1, 16, 16, 32, 64, 128, 1024, 1024]
