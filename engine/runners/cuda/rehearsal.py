"""Plans that nobody asked for: to find out what steps need before the first request comes."""

from __future__ import annotations

from collections.abc import Iterator

from pagoda_server.engine.core.sequence import BlockTable, Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Chunk, StepPlan


def largest_plan(token_budget: int, max_num_seqs: int, block_size: int) -> StepPlan:
    """A step that uses the whole token budget and draws a token for every sequence there can be."""
    length = token_budget // max_num_seqs
    blocks_each = -(-length // block_size)
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=0)
    chunks = []
    for number in range(max_num_seqs):
        blocks = BlockTable(range(number * blocks_each, (number + 1) * blocks_each))
        seq = Sequence(number, [0] * length, Request(length), params, blocks=blocks)
        chunks.append(Chunk(seq, 0, length, samples=True))
    return StepPlan(chunks)


def prompts_of_all_sizes(num_tokens: int, longest: int, block_size: int) -> Iterator[StepPlan]:
    """Steps of every power of two of tokens, and of `num_tokens`: one prompt, or several where `longest` is less.

    All prompts use the first blocks.
    """
    params = SamplingParams(logprobs=0)
    for size in [*(1 << power for power in range(1, num_tokens.bit_length())), num_tokens]:
        chunks = []
        for start in range(0, size, longest):
            length = min(longest, size - start)
            blocks = BlockTable(range(-(-length // block_size)))
            seq = Sequence(-1, [0] * length, Request(length), params, blocks=blocks)
            chunks.append(Chunk(seq, 0, length, samples=True))
        yield StepPlan(chunks)
