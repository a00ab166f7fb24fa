"""Measures how long a call takes on the GPU when its inputs are not cached."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch

COLD_BYTES = 256_000_000  # several times the level-2 cache of any supported GPU
MAX_COPIES = 32
MIN_CALLS = 16  # in a graph, so that gaps between replays are negligible
WARM_UP_S = 0.05  # clocks rise while a GPU works
REPLAYS = 9


class Timer(Protocol):
    """Returns the median microseconds of a call. The calls are alike, have separate buffers, and are made in turn."""

    def __call__(self, calls: Sequence[Callable[[], object]]) -> float: ...


def num_copies(num_bytes: int) -> int:
    """How many sets of buffers calls must rotate through so that none finds its own in the cache."""
    return min(MAX_COPIES, max(1, -(-COLD_BYTES // max(1, num_bytes))))


def cuda_timer(calls: Sequence[Callable[[], object]]) -> float:
    """Time calls by events around replays of a CUDA graph, which is how a decoding model makes them.

    Calls that cannot be captured, because they wait for the GPU, are timed without a graph.
    """
    rounds = -(-MIN_CALLS // len(calls))
    for call in calls:
        call()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        run: Callable[[], object] = graph.replay
    except RuntimeError:
        torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its stream current
        torch.cuda.synchronize()

        def run() -> None:
            for _ in range(rounds):
                for call in calls:
                    call()

    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_S:
        run()
        torch.cuda.synchronize()
    return median(_event_us(run) for _ in range(REPLAYS)) / (rounds * len(calls))


def host_timer(calls: Sequence[Callable[[], object]]) -> float:
    """Time one call on the host's clock, to rehearse measurements without a GPU."""
    started = time.perf_counter()
    calls[0]()
    return 1e6 * (time.perf_counter() - started)


def _event_us(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))
