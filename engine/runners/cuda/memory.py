"""How much of a device's memory the KV cache may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

# Of what a GPU has free after the weights and a step: the rest is for graphs, fragmentation and other processes.
GPU_SHARE = 0.9


def free_after(steps: Iterable[Callable[[], None]], device: torch.device) -> int:
    """Bytes that the cache may take of a GPU on which such steps are to run beside it, each in memory of its own."""
    steps_bytes = 0
    for step in steps:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        steps_bytes += torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int((free - steps_bytes) * GPU_SHARE)
