from __future__ import annotations

import pytest
import torch

from pagoda_server.kernels import PagedKV, bytes_of_block, load_blocks, save_blocks
from tests.kernels.test_copy_blocks import pages_of
from tests.kernels.triton.device import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [1, 3, 16, 37])
def test_what_was_saved_is_loaded_into_every_layer_and_nothing_else_changes(dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(0)
    layers = []
    for _ in range(3):
        keys, values = torch.randn(2, 50, 4, 2, 8, device=DEVICE).to(dtype)
        scales = torch.rand(2, 50, 4, 2, device=DEVICE) if dtype.itemsize == 1 else (None, None)
        layers.append(PagedKV(keys, values, *scales))
    host = torch.full((60, bytes_of_block(layers)), 7, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    sources, rows = torch.randperm(50)[:count], torch.randperm(60)[:count].tolist()
    targets = torch.randperm(50)[:count]
    saved = [[page.float()[sources].clone() for page in pages_of(kv)] for kv in layers]

    save_blocks(layers, sources.to(DEVICE), host, rows)
    others = [row for row in range(60) if row not in rows]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host[others], torch.full_like(host[others], 7)), "no other row is written"
    for kv in layers:
        for page in pages_of(kv):
            page.zero_()
    load_blocks(layers, host, rows, targets.to(DEVICE))

    untouched = [block for block in range(50) if block not in targets.tolist()]
    for kv, expected in zip(layers, saved, strict=True):
        for page, block in zip(pages_of(kv), expected, strict=True):
            assert torch.equal(page.float()[targets], block)
            assert not page.float()[untouched].any()
