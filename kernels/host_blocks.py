"""Copies of whole blocks between a paged KV cache and host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagoda_server.kernels.paged import PagedKV

_AT_ONCE = 16  # blocks that are gathered before they are moved: the room for that is taken beside the cache


def bytes_of_block(layers: Sequence[PagedKV]) -> int:
    """Of one block in every layer."""
    return sum(_bytes_of_row(pages) for pages in _flat(layers))


def save_blocks(layers: Sequence[PagedKV], sources: Tensor, host: Tensor, targets: Sequence[int]) -> None:
    """Block sources[i] of the cache to row targets[i] of `host`: keys, values and the scales of float8 of every layer.

    sources  [num_copies] int64, on the device of the pages
    host     [num_host_blocks, bytes_of_block] uint8 on the host; pinned where the pages are on a GPU
    targets  [num_copies], no row twice

    Plain torch on every device. A block is one stretch of host memory, so that a GPU moves it at once. Nothing waits
    for a GPU, which has made the copies when what was launched on its stream so far is done.
    """
    pages_of = list(_flat(layers))
    for start in range(0, len(targets), _AT_ONCE):
        at_once = sources[start : start + _AT_ONCE]
        gathered = torch.cat([pages.index_select(0, at_once).view(torch.uint8) for pages in pages_of], dim=1)
        for row, target in zip(gathered, targets[start : start + _AT_ONCE], strict=True):
            host[target].copy_(row, non_blocking=True)


def load_blocks(layers: Sequence[PagedKV], host: Tensor, sources: Sequence[int], targets: Tensor) -> None:
    """Row sources[i] of `host` to block targets[i] of the cache: the way back of `save_blocks`.

    targets  [num_copies] int64, on the device of the pages, no block twice
    """
    pages_of = list(_flat(layers))
    widths = [_bytes_of_row(pages) for pages in pages_of]
    room = torch.empty(_AT_ONCE, host.shape[1], dtype=torch.uint8, device=targets.device)
    for start in range(0, len(sources), _AT_ONCE):
        at_once = targets[start : start + _AT_ONCE]
        gathered = room[: len(at_once)]
        for row, source in zip(gathered, sources[start : start + _AT_ONCE], strict=True):
            row.copy_(host[source], non_blocking=True)
        for pages, part in zip(pages_of, gathered.split(widths, dim=1), strict=True):
            pages.index_copy_(0, at_once, part.contiguous().view(pages.dtype))


def _flat(layers: Sequence[PagedKV]) -> Iterator[Tensor]:
    """Each layer's pages as [num_blocks, elements of a block], in an order that never changes.

    In their own dtype: on a CPU, torch selects rows of bytes one byte at a time.
    """
    for kv in layers:
        for pages in (kv.keys, kv.values, kv.key_scales, kv.value_scales):
            if pages is not None:
                flat = pages.flatten(1)
                yield flat.view(torch.uint8) if pages.element_size() == 1 else flat  # float8 has no copy by index


def _bytes_of_row(pages: Tensor) -> int:
    return pages.shape[1] * pages.element_size()
