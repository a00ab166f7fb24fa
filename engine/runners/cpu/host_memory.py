"""Blocks of host memory beside a KV cache that is itself on the host: for the runner of a CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ....kernels import PagedKV, bytes_of_block, load_blocks, save_blocks
from ...core.step import StepPlan


class HostMemory:
    """Room for so many blocks of all layers. Not cleared: what was never used is not resident."""

    def __init__(self, layers: Sequence[PagedKV], num_blocks: int) -> None:
        self._layers = layers
        self._rows = torch.empty(num_blocks, bytes_of_block(layers), dtype=torch.uint8)

    def row(self, host: int) -> memoryview:
        return self._rows[host].numpy().data

    def copy(self, plan: StepPlan) -> float:
        """Makes a plan's saves, then its loads. Returns the seconds that they took."""
        if not plan.saves and not plan.loads:
            return 0.0
        started = time.perf_counter()
        if plan.saves:
            sources, rows = zip(*plan.saves, strict=True)
            save_blocks(self._layers, torch.tensor(sources), self._rows, rows)
        if plan.loads:
            rows, targets = zip(*plan.loads, strict=True)
            load_blocks(self._layers, self._rows, rows, torch.tensor(targets))
        return time.perf_counter() - started
