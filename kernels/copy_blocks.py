"""Copies of whole blocks of a paged KV cache: within it, and to and from host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .paged import PagedKV

_AT_ONCE = 16  # blocks gathered before they are moved, which takes that much memory beside the cache


def copy_blocks(layers: Iterable[PagedKV], sources: Tensor, targets: Tensor) -> None:
    """Copy block sources[i] to block targets[i] in every layer: keys, values and the scales of pages in 8 bits.

    sources, targets  [num_copies] int64, on the device of the pages; targets are distinct, and none is a source

    Plain torch on every device, since it only moves memory. Does not wait for the device.
    """
    for kv in layers:
        for pages in (kv.keys, kv.values, kv.key_scales, kv.value_scales):
            if pages is not None:
                pages = _indexable(pages)
                pages.index_copy_(0, targets, pages.index_select(0, sources))


def bytes_of_block(layers: Sequence[PagedKV]) -> int:
    """The size of one block, summed over all layers."""
    return sum(_bytes_of_row(pages) for pages in _flat(layers))


def save_blocks(layers: Sequence[PagedKV], sources: Tensor, host: Tensor, targets: Sequence[int]) -> None:
    """Copy block sources[i] of the cache to row targets[i] of `host`: keys, values and scales of every layer.

    sources  [num_copies] int64, on the device of the pages
    host     [num_host_blocks, bytes_of_block] uint8 on the host; pinned if the pages are on a GPU
    targets  [num_copies], distinct

    A block is contiguous in host memory, so that a GPU moves it in one transfer. This does not wait for the GPU: the
    copies are made in the order of its stream.
    """
    if not sources.is_cuda:
        for cached, rows in _pairs(layers, host):
            rows[list(targets)] = cached[sources.numpy()]
        return
    pages_of = list(_flat(layers))
    for start in range(0, len(targets), _AT_ONCE):
        at_once = sources[start : start + _AT_ONCE]
        gathered = torch.cat([pages.index_select(0, at_once).view(torch.uint8) for pages in pages_of], dim=1)
        for row, target in zip(gathered, targets[start : start + _AT_ONCE], strict=True):
            host[target].copy_(row, non_blocking=True)


def load_blocks(layers: Sequence[PagedKV], host: Tensor, sources: Sequence[int], targets: Tensor) -> None:
    """Copy row sources[i] of `host` to block targets[i] of the cache: the inverse of `save_blocks`.

    targets  [num_copies] int64, on the device of the pages, distinct
    """
    if not targets.is_cuda:
        for cached, rows in _pairs(layers, host):
            cached[targets.numpy()] = rows[list(sources)]
        return
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


def _pairs(layers: Sequence[PagedKV], host: Tensor) -> Iterator[tuple[NDArray[np.void], NDArray[np.void]]]:
    """Yield each layer's pages on a CPU, and the part of each host block that holds them: one element for each block.

    NumPy copies such an element whole, in a third of the time that torch takes for the numbers in it.
    """
    rows, start = host.numpy(), 0
    for pages in _flat(layers):
        width = _bytes_of_row(pages)
        dtype = np.dtype((np.void, width))
        yield pages.view(torch.uint8).numpy().view(dtype)[:, 0], rows[:, start : start + width].view(dtype)[:, 0]
        start += width


def _flat(layers: Sequence[PagedKV]) -> Iterator[Tensor]:
    """Yield each layer's pages as [num_blocks, elements of a block], in a fixed order.

    Wider elements keep their dtype: on a CPU, torch selects rows of bytes one byte at a time.
    """
    for kv in layers:
        for pages in (kv.keys, kv.values, kv.key_scales, kv.value_scales):
            if pages is not None:
                yield _indexable(pages.flatten(1))


def _indexable(pages: Tensor) -> Tensor:
    """Pages in 8 bits as words, if a row has whole words, else as uint8: float8 cannot be indexed."""
    if pages.element_size() > 1:
        return pages
    return pages.view(torch.uint8 if pages.shape[-1] % 4 else torch.int32)


def _bytes_of_row(pages: Tensor) -> int:
    return pages.shape[1] * pages.element_size()
