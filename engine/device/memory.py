"""How much of a device's memory the KV cache may take."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Of what a GPU has free after the weights and a step: the rest is for graphs, fragmentation and other processes.
GPU_SHARE = 0.9


def free_after(step: Callable[[], None], device: torch.device) -> int:
    """Bytes that the cache may take of a GPU on which such a step is to run beside it."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int((free - step_bytes) * GPU_SHARE)
