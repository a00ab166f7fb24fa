"""Decode steps as CUDA graphs, one for each of a few batch sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from pagoda_server.checkpoints.progress import Progress, no_progress


def bucket_sizes(most: int) -> list[int]:
    """List batch sizes up to `most`. A step is padded to the next: by 3 % to 50 % while it is small, less above."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 1025, 32), *range(1152, most + 128, 128)]
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """
    run   launches a decode step of a number of rows; it reads and writes at addresses that never change
    most  rows of the largest step
    """

    def __init__(self, run: Callable[[int], None], most: int) -> None:
        self._run = run
        self._sizes = bucket_sizes(most)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def size_for(self, rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, rows)]

    def capture(self, progress: Progress = no_progress) -> None:
        """Capture the largest step first, so that the others fit into its memory. This compiles the kernels, too."""
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self._sizes)):
            progress("capturing decode steps", done, len(self._sizes))
            self._run(size)  # compiles and loads kernels, which must not happen during a capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._run(size)
            self._graphs[size] = graph
        progress("capturing decode steps", len(self._sizes), len(self._sizes))

    def launch(self, size: int) -> None:
        """Launch a step of one of the sizes: its graph or, if there is none, kernel by kernel."""
        graph = self._graphs.get(size)
        if graph is None:
            self._run(size)
        else:
            graph.replay()
