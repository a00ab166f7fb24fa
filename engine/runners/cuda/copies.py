"""Copies of blocks on the device, and between the device's KV cache and host memory, in the order of the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pagoda_server.engine.core.step import StepPlan
from pagoda_server.engine.runners.cuda.staging import Staging
from pagoda_server.kernels import PagedKV, bytes_of_block, load_blocks, save_blocks


class CopyInputs:
    """The blocks that a step copies on the device: at most `size`, as a sequence needs at most one, when it starts."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._staging = Staging({"sources": (torch.int64, size), "targets": (torch.int64, size)}, device)

    def send(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """
        pairs   a source and a target each
        return  [pairs] int64 each, valid until the next call
        """
        arrays, count = self._staging.fill(), len(pairs)
        arrays["sources"][:count] = [source for source, _ in pairs]
        arrays["targets"][:count] = [target for _, target in pairs]
        self._staging.send()
        sent = self._staging.device
        return sent["sources"][:count], sent["targets"][:count]


def nothing_copied() -> float:
    return 0.0


class HostCopies:
    """Pinned host memory for `num_blocks` blocks of all layers. Copies run while the host does other work.

    num_device_blocks  blocks of the cache: no step saves or loads more

    Torch allocates pinned memory by powers of two: 5 GB of blocks take 8 GB (2^33 bytes) of the host.
    """

    def __init__(
        self, layers: Sequence[PagedKV], num_blocks: int, num_device_blocks: int, device: torch.device
    ) -> None:
        self._layers, self._device = layers, device
        is_gpu = device.type == "cuda"
        self._rows = torch.empty(num_blocks, bytes_of_block(layers), dtype=torch.uint8, pin_memory=is_gpu)
        wide = (torch.int64, num_device_blocks)
        self._staging = Staging({"saved": wide, "loaded": wide}, device)

    def launch(self, plan: StepPlan) -> Callable[[], float]:
        """Start a plan's saves, then its loads. Return a function that tells their time once they are done."""
        if not plan.saves and not plan.loads:
            return nothing_copied
        arrays = self._staging.fill()
        arrays["saved"][: len(plan.saves)] = [block for block, _ in plan.saves]
        arrays["loaded"][: len(plan.loads)] = [block for _, block in plan.loads]
        stop_watch = _stop_watch(self._device)
        self._staging.send()
        sent = self._staging.device
        if plan.saves:
            save_blocks(self._layers, sent["saved"][: len(plan.saves)], self._rows, [row for _, row in plan.saves])
        if plan.loads:
            load_blocks(self._layers, self._rows, [row for row, _ in plan.loads], sent["loaded"][: len(plan.loads)])
        return stop_watch()


def _stop_watch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Start a stop watch. Return a function that stops it and returns another one, which then tells the seconds."""
    if device.type != "cuda":
        started = time.perf_counter()

        def stop() -> Callable[[], float]:
            seconds = time.perf_counter() - started
            return lambda: seconds

        return stop
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()

    def stop_on_device() -> Callable[[], float]:
        last.record()
        return lambda: float(first.elapsed_time(last)) / 1e3

    return stop_on_device
