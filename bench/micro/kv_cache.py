"""`python -m bench.micro.kv_cache`: attention over a KV cache in int8 and over one in bfloat16, in turn.

Heads are those of the default model.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from pagoda_server.kernels import PagedKV, load_backend, set_num_threads
from pagoda_server.kernels.rope_and_store_kv import quantize_heads

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 4  # of SmolLM2-135M
CASES = (
    (1, 1, 128, 0),
    (8, 1, 128, 0),
    (64, 1, 128, 0),
    (1, 1, 2048, 0),
    (64, 1, 2048, 0),
    (64, 1, 2176, 0),
    (64, 1, 2176, 2048),
    (1, 512, 512, 0),
    (1, 512, 2048, 0),
)
DTYPES = (torch.bfloat16, torch.int8)
# The layers together are so large that most of a layer leaves the processor's caches before it is read again.
CACHE_BYTES = 400_000_000


def pages(num_blocks: int, dtype: torch.dtype) -> PagedKV:
    keys, values = torch.randn(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM).bfloat16()
    if dtype == torch.bfloat16:
        return PagedKV(keys, values)
    (keys, key_scales), (values, value_scales) = quantize_heads(keys, dtype), quantize_heads(values, dtype)
    return PagedKV(keys, values, key_scales, value_scales)


def attention_ms(seqs: int, queries: int, context: int, shared: int, turns: int) -> list[list[float]]:
    """Milliseconds of each turn of a layer for each of DTYPES; a turn runs all layers with one, then with the other.

    shared  the first tokens of a context, which lie in the same blocks for all sequences
    """
    ops = load_backend("native")
    blocks = seqs * -(-context // BLOCK_SIZE)
    num_layers = max(1, min(30, CACHE_BYTES // (blocks * BLOCK_SIZE * KV_HEADS * HEAD_DIM * 4)))
    table = np.random.default_rng(0).permutation(blocks).astype(np.int32).reshape(seqs, -1)
    table[:, : shared // BLOCK_SIZE] = table[0, : shared // BLOCK_SIZE]
    query_start = np.arange(0, seqs * queries + 1, queries, dtype=np.int32)
    context_len = np.full(seqs, context, dtype=np.int32)
    q = torch.randn(seqs * queries, HEADS, HEAD_DIM).bfloat16()
    found: list[list[float]] = [[] for _ in DTYPES]
    caches = [[pages(blocks, dtype) for _ in range(num_layers)] for dtype in DTYPES]
    for _ in range(turns + 1):
        for layers, times in zip(caches, found, strict=True):
            plan = ops.plan_attention(query_start, context_len, table, layers[0], None)
            started = time.perf_counter()
            for layer in layers:
                ops.paged_attention(q, layer, plan)
            times.append(1e3 * (time.perf_counter() - started) / num_layers)
    return [times[1:] for times in found]


def main(
    turns: Annotated[int, typer.Option(min=1)] = 21,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Print the medians of both caches, and the ratio of each turn's times."""
    torch.manual_seed(0)
    console = Console()
    set_num_threads(threads)
    table = Table(title=f"Milliseconds of a layer's attention, {threads} threads, {turns} turns")
    for heading in (
        "sequences × queries × context, shared",
        "bfloat16",
        "int8",
        "speed, int8 ÷ bfloat16",
        "of the turns",
    ):
        table.add_column(heading, justify="right")
    for case in CASES:
        whole, small = attention_ms(*case, turns)
        ratios = [one / two for one, two in zip(whole, small, strict=True)]
        shown = (f"{median(whole):.3f}", f"{median(small):.3f}", f"{median(ratios):.2f}")
        table.add_row(f"{' × '.join(map(str, case[:3]))}, {case[3]}", *shown, f"{min(ratios):.2f} to {max(ratios):.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
