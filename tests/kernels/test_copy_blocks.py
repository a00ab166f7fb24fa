from __future__ import annotations

import pytest
import torch

from pagoda_server.kernels import PagedKV, bytes_of_block, copy_blocks, load_blocks, save_blocks
from tests.kernels.triton.device import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_whole_blocks_are_copied_in_every_layer_and_nothing_else_changes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = []
    for _ in range(3):
        keys, values = torch.randn(2, 9, 4, 2, 8).to(dtype)
        scales = torch.rand(2, 9, 4, 2) if dtype.itemsize == 1 else (None, None)
        layers.append(PagedKV(keys, values, *scales))
    before = [[page.float().clone() for page in pages_of(kv)] for kv in layers]
    copy_blocks(layers, torch.tensor([2, 2, 7]), torch.tensor([0, 5, 8]))
    source_of = [2, 1, 2, 3, 4, 2, 6, 7, 7]
    for kv, old in zip(layers, before, strict=True):
        assert all(torch.equal(new.float(), page[source_of]) for new, page in zip(pages_of(kv), old, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("count", [1, 3, 16, 37])
def test_what_was_saved_is_loaded_into_every_layer_and_nothing_else_changes(dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(0)
    layers = []
    for _ in range(3):
        keys, values = torch.randn(2, 50, 4, 2, 8, device=DEVICE).to(dtype)
        scales = torch.rand(2, 50, 4, 2, device=DEVICE) if dtype.itemsize == 1 else (None, None)
        layers.append(PagedKV(keys, values, *scales))
    host = torch.full((60, bytes_of_block(layers)), 7, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    sources, rows = torch.randperm(50)[:count], tuple(torch.randperm(60)[:count].tolist())
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


def pages_of(kv: PagedKV) -> list[torch.Tensor]:
    return [page for page in (kv.keys, kv.values, kv.key_scales, kv.value_scales) if page is not None]
