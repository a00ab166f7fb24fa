"""Products with weights in groups of codes, and look-ups of their rows, compared with float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels import GATED, HEAD, PLAIN, GroupedFormat, GroupedWeight, load_backend
from pagoda_server.kernels.activate import SWIGLU, activate
from pagoda_server.kernels.triton import linear, linear_dequantized, linear_fixed
from pagoda_server.kernels.triton.configs import IS_INTERPRETED
from pagoda_server.kernels.triton.groups import MXFP4
from pagoda_server.kernels.triton.inputs import IQ4_NL, random_groups
from pagoda_server.kernels.triton.linear import KERNEL_ROWS, in_groups, linear_grouped_triton
from pagoda_server.kernels.triton.linear_dequantized import dequantize, look_up, multiply_dequantized
from pagoda_server.kernels.triton.product import Config, multiply
from tests.kernels.triton.device import DEVICE, compute_each_element_alone

pytestmark = pytest.mark.simulated

FORMATS = {
    "4 bits": GroupedFormat(has_minimum=True),
    "4 bits, groups of 16, no minimum": GroupedFormat(group=16),
    "MXFP4": GroupedFormat(table=MXFP4),
    "IQ4_NL": GroupedFormat(table=IQ4_NL),
    "5 bits": GroupedFormat(bits=5, has_minimum=True),
    "6 bits": GroupedFormat(bits=6, group=16),
    "8 bits": GroupedFormat(bits=8),
    "float8": GroupedFormat(bits=8, is_float=True),
}
EVERY_FORMAT = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
# The interpreter does not round to bfloat16, but cuts off.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def weight_of(form: GroupedFormat, out_size: int, in_size: int) -> GroupedWeight:
    return random_groups(form, out_size, in_size, torch.device(DEVICE))


def rows_of(count: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, size, device=DEVICE).to(dtype)


def exact(weight: GroupedWeight) -> Tensor:
    """[out, in] float64, from the format's definition."""
    form, codes = weight.format, weight.values
    if form.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    values = codes.double() if form.table is None else torch.tensor(form.table, device=DEVICE)[codes.long()].double()
    elements = values * weight.scales.double()[..., None]
    return (elements + (0 if weight.minimums is None else weight.minimums.double()[..., None])).flatten(1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("rows", "in_size", "out_size", "splits"), [(1, 64, 32, 1), (3, 96, 29, 2), (17, 352, 70, 3), (0, 32, 8, 1)]
)
def test_rows_are_multiplied_by_what_the_codes_stand_for(
    form: GroupedFormat, dtype: torch.dtype, rows: int, in_size: int, out_size: int, splits: int
) -> None:
    weight, bias, x = weight_of(form, out_size, in_size), rows_of(1, out_size, dtype)[0], rows_of(rows, in_size, dtype)
    config = Config(rows=16, outputs=32, inputs=64, splits=splits, num_warps=4, num_stages=2)
    found = multiply(x, in_groups(weight), bias, config)
    assert found.dtype == dtype
    if rows:
        assert relative_error(found, x.double() @ exact(weight).T + bias.double()) < TOLERANCES[dtype]


@pytest.mark.parametrize(("group", "kept"), [(64, 32), (128, 128), (256, 128), (384, 0)])
@pytest.mark.parametrize("inputs", [64, 128, 256])
def test_values_in_float8_have_scales_of_any_block(group: int, kept: int, inputs: int) -> None:
    weight = weight_of(GroupedFormat(bits=8, group=group, is_float=True), 37, 768 if group == 256 else 384)
    prepared, x = in_groups(weight), rows_of(5, weight.shape[1], torch.float32)
    assert prepared.group == kept if group < 384 else prepared.scales.ndim == 1
    expected = x.double() @ exact(weight).T
    config = Config(rows=16, outputs=32, inputs=inputs, splits=2, num_warps=4, num_stages=2)
    assert relative_error(multiply(x, prepared, None, config), expected) < 1e-6
    assert relative_error(multiply_dequantized(x, prepared, None), expected) < 1e-6
    for name, weights in (("triton", "fp8"), ("triton", "groups"), ("reference", "fp8"), ("reference", "groups")):
        ops = load_backend(name, weights)
        assert ops.keeps(weight.format)
        assert relative_error(ops.linear(weight, None)(x), expected) < 1e-6


def test_a_format_that_the_gpu_or_the_precision_does_not_take_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMATS["float8"]
    assert not load_backend("triton", "fp8").keeps(FORMATS["8 bits"])
    assert not load_backend("triton", "int8-weight").keeps(form)
    assert not load_backend("native", "int4").keeps(form)
    monkeypatch.setattr(linear, "IS_INTERPRETED", False)
    for capability, kept in ((80, False), (89, True)):
        monkeypatch.setattr(linear, "capability", lambda found=capability: found)
        assert load_backend("triton", "groups").keeps(form) == kept
        assert load_backend("triton", "groups").keeps(FORMATS["4 bits"])


@EVERY_FORMAT
@pytest.mark.parametrize("rows", [1, 20, KERNEL_ROWS + 1])
@pytest.mark.parametrize("is_gated", [False, True])
def test_makers_choose_kernels_that_agree(form: GroupedFormat, rows: int, is_gated: bool) -> None:
    weight, use = weight_of(form, 40, 96), GATED if is_gated else PLAIN
    x = rows_of(rows, 192 if is_gated else 96, torch.float32)
    gated = activate(x.double(), SWIGLU) if is_gated else x.double()
    assert relative_error(linear_grouped_triton(weight, None, use)(x), gated @ exact(weight).T) < 1e-5


def test_many_rows_are_multiplied_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "multiply_dequantized", lambda x, weight, bias: (weight, bias))
    weight = weight_of(FORMATS["4 bits"], 8, 32)
    found, bias = linear_grouped_triton(weight, None)(rows_of(KERNEL_ROWS + 1, 32, torch.float32))
    assert found.values.data_ptr() == weight.values.data_ptr(), "codes are not copied"
    assert bias is None


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("in_size", [32, 352])
def test_a_widened_weight_is_rounded_once(form: GroupedFormat, dtype: torch.dtype, in_size: int) -> None:
    weight = weight_of(form, 9, in_size)
    expected = exact(weight).to(dtype)
    # In float32 the sum of a scaled value and a minimum may be rounded twice, which the other dtypes hardly show.
    rtol, atol = {
        torch.float32: (2**-22, 1e-6),
        torch.float16: (2**-10, 0.0),
        torch.bfloat16: (2**-7 if IS_INTERPRETED else 2**-8, 2**-8 if IS_INTERPRETED else 1e-6),
    }[dtype]
    widened = dequantize(in_groups(weight), 2, torch.empty(5, in_size, dtype=dtype, device=DEVICE))
    torch.testing.assert_close(widened, expected[2:7], rtol=rtol, atol=atol)
    ids = torch.tensor([8, 0, 8, 3], device=DEVICE)
    torch.testing.assert_close(look_up(in_groups(weight), ids, dtype), expected[ids], rtol=rtol, atol=atol)
    assert look_up(in_groups(weight), ids[:0], dtype).shape == (0, in_size)


@EVERY_FORMAT
def test_parts_of_a_widened_weight_give_the_product_of_the_whole(
    form: GroupedFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x, bias = weight_of(form, 70, 64), rows_of(5, 64, torch.float32), rows_of(1, 70, torch.float32)[0]
    monkeypatch.setattr(linear_dequantized, "SCRATCH_BYTES", 31 * 64 * 4)
    found = multiply_dequantized(x, in_groups(weight), bias)
    assert relative_error(found, x.double() @ exact(weight).T + bias.double()) < 1e-6


@pytest.mark.parametrize("name", ["4 bits", "6 bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch_if_sums_have_one_order(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_each_element_alone(monkeypatch)
    monkeypatch.setattr(linear_fixed, "SPLIT_INPUTS", 64)
    weight, x = weight_of(FORMATS[name], 70, 160), rows_of(75, 160, dtype)
    product = load_backend("triton", "groups", True).linear(weight, None)
    together = product(x)
    assert relative_error(together, x.double() @ exact(weight).T) < 2 * TOLERANCES[dtype]
    for processors in (1, 100):
        monkeypatch.setattr(linear_fixed, "num_processors", lambda _, count=processors: count)
        for rows in (slice(0, 1), slice(74, 75), slice(60, 75)):
            assert torch.equal(product(x[rows]), together[rows])


def test_a_broken_row_and_a_broken_scale_spoil_no_other() -> None:
    weight, x = weight_of(FORMATS["4 bits"], 33, 96), rows_of(5, 96, torch.float32)
    x[3, 95] = torch.nan
    weight.scales[7, 2] = torch.nan
    found = multiply(x, in_groups(weight), None, Config(16, 32, 64, splits=2, num_warps=4, num_stages=2)).isnan()
    assert torch.equal(found.any(dim=0), torch.ones(33, dtype=torch.bool, device=DEVICE))
    assert found[3].all()
    assert found[:3].sum(dim=0).tolist() == [3 * (output == 7) for output in range(33)]


def test_the_reference_of_a_weight_in_groups_keeps_activations() -> None:
    weight, x = weight_of(FORMATS["6 bits"], 40, 96), rows_of(3, 96, torch.float32)
    ops = load_backend("reference", "groups")
    assert ops.keeps(weight.format)
    assert relative_error(ops.linear(weight, None)(x), x.double() @ exact(weight).T) < 1e-6
    whole = rows_of(40, 96, torch.float32)
    for name in ("reference", "triton"):
        found = load_backend(name, "groups").linear(whole, None)(x)
        assert relative_error(found, x.double() @ whole.double().T) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table_have_the_dtype_of_the_model_and_share_the_codes_of_a_tied_head(dtype: torch.dtype) -> None:
    weight, ops = weight_of(FORMATS["4 bits"], 40, 96), load_backend("triton", "groups")
    head = ops.linear(weight, None, HEAD)
    rows = ops.embedding(weight, head, dtype)(torch.tensor([39, 0, 39], device=DEVICE))
    torch.testing.assert_close(rows, exact(weight)[[39, 0, 39]].to(dtype), rtol=TOLERANCES[dtype], atol=1e-2)
    assert head.weight.values.data_ptr() == weight.values.data_ptr()  # type: ignore[attr-defined]
