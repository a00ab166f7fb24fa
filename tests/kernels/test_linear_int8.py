"""Products in int8: compiled code against the reference, and the error against the unquantized product."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels.linear import PLAIN
from pagoda_server.kernels.linear_int8 import (
    GROUP,
    PANEL,
    PackedInt8,
    dequantize_weight,
    linear_int8,
    linear_int8_native,
    quantize_rows,
    quantize_weight,
)
from pagoda_server.kernels.native_module import native
from tests.kernels.products import gated

compiled = pytest.mark.usefixtures("each_instruction_set")


def test_quantized_values_are_within_half_a_step() -> None:
    x = (torch.randn(5, 3 * GROUP + 7) + 2) * torch.logspace(-3, 3, 5)[:, None]

    def is_near(restored: Tensor, scales: Tensor) -> bool:
        steps = scales.reshape(5, -1).repeat_interleave(GROUP, dim=1)[:, : x.shape[1]]
        return bool(((restored.flatten(1)[:, : x.shape[1]] - x).abs() <= steps * 0.501).all())

    values, scales = quantize_weight(x)
    assert values.shape == (5, 4, GROUP)
    assert values.abs().max() == 127
    assert (values[:, 3, 7:] == 0).all()
    assert is_near(values * scales, scales)
    values, scales, least = quantize_rows(x)
    assert (values.min(), values.max()) == (0, 255)
    assert is_near(values * scales[..., None] + least[..., None], scales)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [[70], [PANEL, 6], [2 * PANEL, PANEL, 1]])
def test_rows_that_are_packed_apart_are_those_of_the_whole(dtype: torch.dtype, sizes: list[int]) -> None:
    weight, x = torch.randn(sum(sizes), 100).to(dtype), torch.randn(3, 100)
    place = PackedInt8.allocate(*weight.shape)
    for part, rows in zip(place.split(sizes), weight.split(sizes), strict=True):
        part.copy_(rows)
    assert torch.equal(linear_int8_native(place, None)(x), linear_int8_native(weight.float(), None)(x))


@compiled
def test_rows_that_no_weight_fills_are_finite_whatever_the_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype=torch.float32: torch.full(shape, -1).to(dtype) / 0)
    place = PackedInt8.allocate(PANEL + 6, 100)
    monkeypatch.undo()
    place.copy_(torch.ones(PANEL + 6, 100))
    assert place.is_finite


@pytest.mark.parametrize("level", [0.0, 3.0, -0.5])
def test_a_group_of_one_value_is_exact(level: float) -> None:
    values, scales, least = quantize_rows(torch.full((2, GROUP), level))
    assert (values * scales[..., None] + least[..., None] == level).all()
    if level == 0:
        values, scales = quantize_weight(torch.zeros(2, GROUP))
        assert (values * scales == 0).all()


def test_neighbours_can_be_limited() -> None:
    weight = torch.randn(50, 3 * GROUP)
    weight[0, :2], weight[1, :2], weight[2, :2] = 5, -9, torch.tensor([-9, 7.5])
    values, scales = quantize_weight(weight, limits_pairs=True)
    pairs = values.int().unflatten(-1, (-1, 2)).sum(dim=-1)
    assert (pairs.min(), pairs.max()) == (-128, 128)
    assert values[2, 0, :2].tolist() == [-127, 106]  # opposite signs need no limit
    steps = scales.flatten(1).repeat_interleave(GROUP // 2, dim=1)
    assert (dequantize_weight(values, scales) - weight).abs().sub(0.501 * steps).max() <= 0


def limits_pairs() -> bool:
    assert native is not None
    return bool(native.pairs_are_limited())


def test_one_row_does_not_touch_the_precision_of_another() -> None:
    weight, x = torch.randn(40, 2 * GROUP), torch.randn(3, 2 * GROUP)
    alone = linear_int8(weight, None)(x[1:2])
    x[0] *= 1e6
    assert torch.equal(linear_int8(weight, None)(x)[1:2], alone)


def test_the_error_is_that_of_the_rounding() -> None:
    x, weight = torch.randn(64, 576), torch.randn(128, 576)
    product, exact = linear_int8(weight, None)(x), x @ weight.T
    assert (product - exact).norm() / exact.norm() < 0.01


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 32), (17, 29), (576, 100), (100, 576)])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 33, 97, 200])
def test_compiled_products_are_those_of_the_reference(
    dtype: torch.dtype, has_bias: bool, in_size: int, out_size: int, rows: int
) -> None:
    x, weight = torch.randn(rows, in_size).to(dtype), torch.randn(out_size, in_size).to(dtype)
    bias = torch.randn(out_size).to(dtype) if has_bias else None
    product, expected = linear_int8_native(weight, bias)(x), linear_int8(weight, bias, PLAIN, limits_pairs())(x)
    assert product.dtype == dtype
    # A value half-way between two steps may be rounded to either, which changes a product by a step times a weight.
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    assert (product - expected).abs().mean() <= tolerance * in_size**0.5 or rows == 0
    torch.testing.assert_close(product, expected, atol=0.2, rtol=tolerance)


@compiled
@pytest.mark.parametrize("pair", [(1, 1), (-1, -1), (1, -1), (-1, 1), (1, 0), (0, -1)])
@pytest.mark.parametrize("inputs", [(255, 255), (255, 0), (0, 255)])
def test_the_greatest_products_of_neighbours_are_whole(pair: tuple[int, int], inputs: tuple[int, int]) -> None:
    weight = torch.tensor(pair).float().repeat(PANEL, GROUP // 2)
    x = torch.tensor(inputs).float().repeat(2, GROUP // 2)
    x[:, :2], weight[:, :2] = torch.tensor([0.0, 255.0]), 0  # so that activations are counted from 0 to 255
    torch.testing.assert_close(linear_int8_native(weight, None)(x), x @ weight.T, atol=0, rtol=1e-3)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_size", [64, 17, 576, 100])
@pytest.mark.parametrize("rows", [0, 1, 9, 97])
def test_compiled_gated_products_are_those_of_the_reference(dtype: torch.dtype, in_size: int, rows: int) -> None:
    x, weight = torch.randn(rows, 2 * in_size).to(dtype), torch.randn(40, in_size).to(dtype)
    product, expected = gated(linear_int8_native)(weight, None)(x), gated(linear_int8)(weight, None, limits_pairs())(x)
    tolerance = 1e-4 if dtype == torch.float32 else 0.01  # a value between two steps may be rounded to either
    torch.testing.assert_close(product, expected, atol=0.02 * in_size**0.5, rtol=tolerance)


@compiled
def test_a_compiled_row_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight = torch.randn(203, 192).bfloat16(), torch.randn(70, 192).bfloat16()
    product = linear_int8_native(weight, None)
    together = product(x)
    for rows in (1, 2, 5, 8, 31, 100):
        assert torch.equal(product(x[:rows]), together[:rows])
    assert torch.equal(product(x[100:101]), together[100:101])


@compiled
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_gives_nan_and_leaves_the_others_alone(poison: float) -> None:
    def nan_rows(product: Tensor) -> list[bool]:
        return product.isnan().all(dim=1).tolist()

    x, weight = torch.randn(20, 130), torch.randn(40, 130)
    product = linear_int8_native(weight, None)
    clean = product(x)
    x[3, 129] = poison
    broken = product(x)
    assert nan_rows(broken) == [row == 3 for row in range(20)]
    kept = torch.arange(20) != 3
    assert torch.equal(broken[kept], clean[kept])


@compiled
def test_ops_called_from_several_threads_take_turns() -> None:
    x, weight = torch.randn(50, 576).bfloat16(), torch.randn(300, 576).bfloat16()
    product = linear_int8_native(weight, None)
    expected = product(x)

    def is_right(_: int) -> bool:
        return all(torch.equal(product(x[: rows + 1]), expected[: rows + 1]) for rows in range(50))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, range(8)))
