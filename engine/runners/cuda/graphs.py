"""Steps as CUDA graphs: which shapes are captured, and which of them a step is padded to."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ....checkpoints.progress import Progress, no_progress
from ...core.step import Chunk

# The most tokens of a captured step with prompts. An estimate, from an H100's data sheet (989 TFLOP/s in bfloat16,
# 3.35 TB/s): up to about 300 rows, a product takes as long as reading its weights does. So padding to that many costs
# little, and a step of more tokens keeps the GPU busy for longer than its kernels take to launch.
MIXED_TOKENS = 320
MIXED_CHUNKS = 16  # of prompts, at most, in a captured step
_DECODES = (0, 16, 64, 128, 192, 256)
_PROMPT_TOKENS = (16, 32, 64, 128, 192, 256)
_SAMPLE = 3  # graphs that are captured to find out how much memory one takes


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step's layout: decodes, each of one token, then the chunks of prompts.

    decodes  drafts included
    tokens  of all chunks together
    has_adapters  some sequences may have one
    """

    decodes: int
    tokens: int = 0
    chunks: int = 0
    has_adapters: bool = False

    @staticmethod
    def of(chunks: Iterable[Chunk]) -> StepShape:
        """Return the shape of a step without padding."""
        decodes = num_tokens = num_chunks = 0
        has_adapters = False
        for chunk in chunks:
            has_adapters |= chunk.seq.adapter_slot >= 0
            if chunk.is_decode:
                decodes += chunk.length
            else:
                num_tokens += chunk.length
                num_chunks += 1
        return StepShape(decodes, num_tokens, num_chunks, has_adapters)

    @property
    def num_tokens(self) -> int:
        return self.decodes + self.tokens

    @property
    def num_seqs(self) -> int:
        return self.decodes + self.chunks


def decode_sizes(most: int) -> list[int]:
    """List batch sizes up to `most`. A step is padded to the next: by 3 % to 50 % while it is small, less above."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 1025, 32), *range(1152, most + 128, 128)]
    return [size for size in sizes if size < most] + [most]


class StepGraphs:
    """The graphs of steps without prompts, by batch size, and of small steps with prompts, by two sizes.

    pad     fills a shape's inputs with padding
    run     launches a step of a shape; it reads and writes at addresses that never change
    stream  on which steps are captured and launched; None: the device has no graphs
    has_adapters  there are graphs of steps with adapters beside those without, which pay nothing for them

    There are 53 graphs for 256 sequences, or twice as many. Steps with prompts have few sizes, as padding costs them
    little, and each graph takes tens of milliseconds to capture.
    """

    def __init__(
        self,
        pad: Callable[[StepShape], None],
        run: Callable[[StepShape], None],
        max_decodes: int,
        token_budget: int,
        stream: torch.cuda.Stream | None,
        has_adapters: bool = False,
    ) -> None:
        self._pad, self._run, self._stream = pad, run, stream
        self._sizes = decode_sizes(max_decodes)
        self._decodes = _levels(_DECODES, max_decodes)
        self._tokens = _levels(_PROMPT_TOKENS, token_budget)
        self._chunks = min(MIXED_CHUNKS, max_decodes) + 1  # padded tokens belong to one more
        mixed = (
            StepShape(decodes, tokens, self._chunks)
            for decodes in self._decodes
            for tokens in self._tokens
            if decodes + tokens <= MIXED_TOKENS
        )
        shapes = [*(StepShape(size) for size in self._sizes), *mixed]
        if has_adapters:
            shapes += [replace(shape, has_adapters=True) for shape in shapes]
        # The largest first, so that the others fit into its memory.
        self.shapes = sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_seqs), reverse=True)
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}

    def fit(self, needed: StepShape) -> StepShape:
        """Return the shape to launch a step in: a captured one with padding or, if it is too large, its own."""
        if not needed.chunks:
            return StepShape(self._sizes[bisect_left(self._sizes, needed.decodes)], has_adapters=needed.has_adapters)
        decodes, tokens = bisect_left(self._decodes, needed.decodes), bisect_left(self._tokens, needed.tokens)
        if needed.chunks >= self._chunks or decodes == len(self._decodes) or tokens == len(self._tokens):
            return needed
        padded = StepShape(self._decodes[decodes], self._tokens[tokens], self._chunks, needed.has_adapters)
        return padded if padded.num_tokens <= MIXED_TOKENS else needed

    def capture(self, progress: Progress = no_progress) -> None:
        """Capture all shapes on the current stream, the runner's. This compiles the kernels, too."""
        self._graphs = self._captured(self.shapes, progress)

    def num_bytes(self) -> int:
        """Estimate the memory of all graphs, beside what their kernels write to. Captures a few and drops them."""
        before = _bytes_beside_tensors()
        graphs = self._captured(self.shapes[:_SAMPLE], no_progress)
        taken = _bytes_beside_tensors() - before
        return max(taken, 0) * len(self.shapes) // len(graphs)

    def launch(self, shape: StepShape) -> None:
        """Launch a step on the current stream: its graph or, if there is none, kernel by kernel."""
        graph = self._graphs.get(shape)
        if graph is None:
            self._run(shape)
        else:
            graph.replay()

    def _captured(self, shapes: Sequence[StepShape], progress: Progress) -> dict[StepShape, torch.cuda.CUDAGraph]:
        pool = torch.cuda.graph_pool_handle()
        graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        with _no_garbage_collection():
            for done, shape in enumerate(shapes):
                progress("capturing steps", done, len(shapes))
                self._pad(shape)
                # This compiles and loads kernels, which must not happen during a capture. It also allocates cuBLAS's
                # workspace of this thread and stream, which must not come from the graphs' pool: other steps use it.
                self._run(shape)
                graphs[shape] = graph = torch.cuda.CUDAGraph()
                # The stream is named: torch's own for captures is shared by the whole process.
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    self._run(shape)
                graph.replay()  # moves it to the device, for which its first step would wait
        progress("capturing steps", len(shapes), len(shapes))
        return graphs


def _levels(levels: Sequence[int], most: int) -> list[int]:
    return [level for level in levels if level < most] + ([most] if most <= levels[-1] else [])


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not within: to free CUDA's objects during a capture would break it."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _bytes_beside_tensors() -> int:
    """Return how much of the device's memory is in use, but not by torch's allocator."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
