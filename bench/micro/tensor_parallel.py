"""`python -m bench.micro.tensor_parallel`: what a group of processes adds to a step, without the model.

Prints the time to pack and send a decode step to one rank, that of one sum over the ranks, of which a step has two
a layer, and that of gathering the logits. The other ranks only receive, sum and send.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
import torch
import typer

from pagoda_server.engine.models import GroupInputs, StepInputs
from pagoda_server.engine.models.share import Share
from pagoda_server.engine.runners.cpu.packed_step import packed_inputs
from pagoda_server.engine.runners.cpu.ranks import gather_columns, join, receive_frame, send_frame, sum_over_ranks
from pagoda_server.kernels import load_backend
from pagoda_server.kernels.paged import PagedKV
from pagoda_server.settings import EngineConfig

BLOCK_SIZE = 4
PAUSE_S = 0.002  # of work between steps, in which the other rank begins to wait again


def main(
    ranks: Annotated[int, typer.Option(help="Processes that sum.")] = 2,
    hidden: Annotated[int, typer.Option(help="Values of a row that is summed.")] = 576,
    vocab: Annotated[int, typer.Option(help="Logits of a row.")] = 49_152,
    steps: Annotated[int, typer.Option(help="Steps of each measurement.")] = 500,
) -> None:
    torch.set_num_threads(1)
    for num_seqs, context in ((1, 512), (8, 512), (64, 512), (64, 2048)):
        inputs = decode_step(num_seqs, context)
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            while receive_frame(theirs) is not None:
                pass
            os._exit(0)
        theirs.close()
        times = timed(partial(send, ours, inputs), steps)
        size = len(packed_inputs(inputs)) / 1e3
        print(f"send {num_seqs} sequences of {context} tokens, {size:.1f} KB: {times}")
        ours.close()
        os.wait()
    with tempfile.TemporaryFile() as store:
        config = EngineConfig(tensor_parallel=ranks)
        rank = next((rank for rank in range(1, ranks) if os.fork() == 0), 0)
        join(config, store.fileno(), rank)
        for rows in (1, 8, 64, 512):
            values = torch.ones(rows, hidden, dtype=torch.bfloat16)
            times = timed(partial(sum_over_ranks, ranks, values), steps, pause_s=0)
            if rank == 0:
                print(f"sum {rows} rows of {hidden} values over {ranks} ranks: {times}")
        for rows in (1, 8, 64):
            logits = torch.ones(rows, Share(rank, ranks).of(vocab, "tokens").size)
            times = timed(partial(gather_columns, rank, ranks, logits, vocab), steps // 5, pause_s=0)
            if rank == 0:
                print(f"gather {rows} rows of {vocab} logits from {ranks} ranks: {times}")
        sys.stdout.flush()
        if rank:
            os._exit(0)
        for _ in range(1, ranks):
            os.wait()


def send(connection: socket.socket, inputs: StepInputs) -> None:
    send_frame(connection, packed_inputs(inputs))


def decode_step(num_seqs: int, context: int) -> StepInputs:
    """The inputs of a step of decodes, whose sequences have so many tokens each."""
    empty = torch.empty(1, BLOCK_SIZE, 1, 64)
    table = np.arange(num_seqs * context // BLOCK_SIZE, dtype=np.int32).reshape(num_seqs, -1)
    starts, contexts = np.arange(num_seqs + 1, dtype=np.int32), np.full(num_seqs, context, dtype=np.int32)
    plan = load_backend("reference").plan_attention(starts, contexts, table, PagedKV(empty, empty), None)
    ids = torch.arange(num_seqs)
    return StepInputs(ids, torch.full_like(ids, context - 1), None, [GroupInputs(ids, {None: plan})], [0])


def timed(work: Callable[[], object], count: int, pause_s: float = PAUSE_S) -> str:
    times = []
    for _ in range(count):
        until = time.perf_counter() + pause_s
        while (started := time.perf_counter()) < until:
            pass
        work()
        times.append((time.perf_counter() - started) * 1e6)
    cuts = statistics.quantiles(times, n=100)
    return f"p50 {cuts[49]:.0f} µs, p99 {cuts[98]:.0f} µs"


if __name__ == "__main__":
    typer.run(main)
