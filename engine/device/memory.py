"""How much of a device's memory the KV cache may take."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from engine.sequence import Chunk, SamplingParams, Sequence, StepPlan

# Of what a GPU has free after the weights and a step: the rest is for graphs, fragmentation and other processes.
GPU_SHARE = 0.9


def largest_plan(token_budget: int, max_num_seqs: int, block_size: int) -> StepPlan:
    """A step that uses the whole token budget and draws a token for every sequence there can be."""
    length = token_budget // max_num_seqs
    blocks_each = -(-length // block_size)
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=0)
    chunks = []
    for number in range(max_num_seqs):
        seq = Sequence(number, [0] * length, length, params, arrived=0.0, deadline=math.inf)
        seq.blocks = list(range(number * blocks_each, (number + 1) * blocks_each))
        chunks.append(Chunk(seq, 0, length, samples=True))
    return StepPlan(chunks)


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
