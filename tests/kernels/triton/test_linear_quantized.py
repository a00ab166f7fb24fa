from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels import Linear
from pagoda_server.kernels.linear_quantized import (
    linear_fp8_weight,
    linear_int8_weight,
)
from pagoda_server.kernels.triton.linear import (
    KERNEL_ROWS,
    MOST_SPLITS,
    kernel_config,
    linear_fp8_weight_triton,
    linear_int8_weight_triton,
)
from tests.kernels.products import gated
from tests.kernels.triton.device import DEVICE

pytestmark = pytest.mark.simulated

Op = Callable[[Tensor, Tensor | None], Linear]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}


@pytest.mark.parametrize(
    ("op", "reference", "width"),
    [
        (linear_int8_weight_triton, linear_int8_weight, 1),
        (gated(linear_int8_weight_triton), gated(linear_int8_weight), 2),
        (linear_fp8_weight_triton, linear_fp8_weight, 1),
        (gated(linear_fp8_weight_triton), gated(linear_fp8_weight), 2),
    ],
    ids=["int8", "gated int8", "fp8", "gated fp8"],
)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "in_size", "out_size"),
    [(0, 16, 16), (1, 128, 64), (3, 17, 29), (33, 576, 70), (70, 192, 130), (KERNEL_ROWS + 1, 192, 70), (300, 17, 29)],
)
def test_products_are_those_of_the_reference(
    op: Op, reference: Op, width: int, dtype: torch.dtype, has_bias: bool, rows: int, in_size: int, out_size: int
) -> None:
    x = torch.randn(rows, in_size * width, device=DEVICE).to(dtype)
    weight = (torch.randn(out_size, in_size, device=DEVICE) * in_size**-0.5).to(dtype)
    weight *= torch.logspace(-1, 1, out_size, device=DEVICE, dtype=dtype)[:, None]
    bias = torch.randn(out_size, device=DEVICE).to(dtype) if has_bias else None
    product, expected = op(weight, bias)(x), reference(weight, bias)(x)
    assert product.dtype == dtype
    torch.testing.assert_close(product, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128, 1024])
@pytest.mark.parametrize("sizes", [(6144, 4096), (4096, 14336), (128256, 4096), (576, 1536), (960, 576)])
def test_defaults_occupy_the_gpu_and_leave_every_split_enough_to_read(
    rows: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_server.kernels.triton.linear.num_processors", lambda _: 132)
    config = kernel_config(rows, sizes, torch.device("cuda"))
    tiles = -(-sizes[1] // config.inputs)
    programs = -(-rows // config.rows) * -(-sizes[0] // config.outputs) * config.splits
    assert config.splits == 1 or tiles // config.splits >= 4
    assert config.splits == 1 or programs <= 2 * 132
    assert programs >= 132 or tiles // (config.splits + 1) < 4 or config.splits == MOST_SPLITS


def test_a_gpu_without_float8_is_told_which_option_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnOldGpu(Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    weight = torch.randn(4, 4).as_subclass(OnOldGpu)
    for op in (linear_fp8_weight_triton, gated(linear_fp8_weight_triton)):
        with pytest.raises(ValueError, match=r"--quantization fp8 .*8\.9.* 8\.0; --quantization int8"):
            op(weight, None)
