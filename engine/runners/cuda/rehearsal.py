"""Steps that run before the first request: they compile kernels, and show how much memory the KV cache may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from ...core.sequence import BlockTable, Request, SamplingParams, Sequence, WindowTable
from ...core.step import Chunk, StepPlan

# The cache takes this share of what weights, steps and graphs leave. Fragmentation and other processes need the rest.
GPU_SHARE = 0.9


def largest_plan(token_budget: int, max_num_seqs: int, block_size: int, num_windows: int = 0) -> StepPlan:
    """Return a step that uses the whole token budget and draws a token for the largest number of sequences."""
    length = token_budget // max_num_seqs
    blocks_each = -(-length // block_size)
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=0)
    chunks = []
    for number in range(max_num_seqs):
        blocks = _table(range(number * blocks_each, (number + 1) * blocks_each), num_windows)
        seq = Sequence(number, [0] * length, Request(length), params, blocks=blocks)
        chunks.append(Chunk(seq, 0, length, samples=True))
    return StepPlan(chunks)


def prompts_of_all_sizes(num_tokens: int, longest: int, block_size: int, num_windows: int = 0) -> Iterator[StepPlan]:
    """Yield a step of each power of two of tokens and one of `num_tokens`, in prompts of at most `longest` tokens.

    All prompts use the first blocks.
    """
    params = SamplingParams(logprobs=0)
    for size in [*(1 << power for power in range(1, num_tokens.bit_length())), num_tokens]:
        chunks = []
        for start in range(0, size, longest):
            length = min(longest, size - start)
            blocks = _table(range(-(-length // block_size)), num_windows)
            seq = Sequence(-1, [0] * length, Request(length), params, blocks=blocks)
            chunks.append(Chunk(seq, 0, length, samples=True))
        yield StepPlan(chunks)


def _table(blocks: range, num_windows: int) -> BlockTable:
    """Return a table whose groups of layers all use the same blocks: what they hold does not matter."""
    return BlockTable(blocks, windows=[WindowTable(blocks) for _ in range(num_windows)])


def free_after(steps: Iterable[Callable[[], None]], device: torch.device) -> int:
    """Return how many bytes of a GPU are free if these steps must fit, each in its own memory."""
    steps_bytes = 0
    for step in steps:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        steps_bytes += torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free - steps_bytes
