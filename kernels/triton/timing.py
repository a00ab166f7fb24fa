"""How long a call takes on the GPU, when what it reads is not in the cache already."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch

COLD_BYTES = 256_000_000  # several times the level-2 cache of any GPU here
MAX_COPIES = 32
MIN_CALLS = 16  # of a graph, so that the gaps between its replays do not count
WARM_UP_S = 0.05  # clocks rise while a GPU works
REPLAYS = 9


class Timer(Protocol):
    """Microseconds of one call: a median. The calls are alike, each with buffers of its own, and are made in turns."""

    def __call__(self, calls: Sequence[Callable[[], object]]) -> float: ...


def num_copies(num_bytes: int) -> int:
    """Sets of buffers that calls must rotate through so that each finds the cache without its own."""
    return min(MAX_COPIES, max(1, -(-COLD_BYTES // max(1, num_bytes))))


def cuda_timer(calls: Sequence[Callable[[], object]]) -> float:
    """By events around replays of a CUDA graph, as the calls are made when a model decodes.

    Calls that cannot be captured, because they wait for the GPU, are timed one after the other as they come.
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
        torch.cuda.set_stream(torch.cuda.default_stream())  # a capture that fails leaves its own behind
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
    """Where there is no GPU, so that what is measured on one can be rehearsed: one call, on the host's clock."""
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
