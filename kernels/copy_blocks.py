"""Copies of whole blocks of a paged KV cache."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pagoda_server.kernels.paged import PagedKV


def copy_blocks(layers: Iterable[PagedKV], sources: Tensor, targets: Tensor) -> None:
    """Block sources[i] to block targets[i], in every layer: keys, values and the scales of float8.

    sources, targets  [num_copies] int64, on the device of the pages; no block twice among the targets, and none of them
                      among the sources

    Plain torch on every device: it moves memory and does nothing else. Waits for nothing.
    """
    for kv in layers:
        for pages in (kv.keys, kv.values, kv.key_scales, kv.value_scales):
            if pages is not None:
                pages = pages.view(torch.uint8) if pages.element_size() == 1 else pages  # float8 has no copy by index
                pages.index_copy_(0, targets, pages.index_select(0, sources))
