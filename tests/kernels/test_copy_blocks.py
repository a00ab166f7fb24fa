from __future__ import annotations

import pytest
import torch

from pagoda_server.kernels import PagedKV, copy_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
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


def pages_of(kv: PagedKV) -> list[torch.Tensor]:
    return [page for page in (kv.keys, kv.values, kv.key_scales, kv.value_scales) if page is not None]
