"""How much of the time the GPU has nothing to do, by its own record of the kernels that it ran."""

from __future__ import annotations

import time

from torch.profiler import ProfilerActivity, profile

WINDOW_S = 0.1


def start_profiler() -> None:
    """It takes seconds at its first use, and is to be there before graphs that it will watch are captured."""
    with profile(activities=[ProfilerActivity.CUDA]):
        pass


def idle_fraction() -> float:
    """Watches whatever runs for a moment. Raises what the profiler raises where it is not allowed."""
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        time.sleep(WINDOW_S)
    spans = sorted(
        (float(event.time_range.start), float(event.time_range.end))
        for event in watched.events()
        if event.device_type.name == "CUDA"
    )
    return 1.0 - busy(spans) / (max(end for _, end in spans) - spans[0][0])


def busy(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans, in order of their starts."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
