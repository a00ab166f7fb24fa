"""`python -m bench.micro.failover`: how long streams pause when one of three engines is killed.

64 streams run through one router. One engine is killed once each stream has 50 tokens. The pause of a stream is the
time between its last message before that and its first one after it. Then the engine is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import grpc
import typer

from bench.processes import spawned
from bench.systems import served
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

ENGINES, STREAMS, TOKENS, KILLED_AT = 3, 64, 300, 50


def main(
    model: Annotated[str, typer.Option(help="Model to serve.")] = "synthetic",
    options: Annotated[str, typer.Option(help="The engines' options.")] = "--step-ms 10 --max-num-seqs 64",
    turns: Annotated[int, typer.Option(help="Engines that are killed, one after another.")] = 6,
) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        addresses = [f"{'shm' if at % 2 else 'unix'}:{folder}/{at}" for at in range(ENGINES)]

        def start(at: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "pagoda_server.engine", "--model", model, "--listen", addresses[at]]
            return stack.enter_context(spawned([*command, *options.split()], Path(folder, f"log{at}")))

        engines = [start(at) for at in range(ENGINES)]
        server = stack.enter_context(served(["--model", model, "--engine", ",".join(addresses)]))
        pauses: list[float] = []
        for turn in range(turns):
            killed = turn % ENGINES
            wait_whole(server.address)
            gaps, num_lost = asyncio.run(run(server.address, killed, engines[killed].kill))
            engines[killed] = start(killed)
            print(f"turn {turn}: {num_lost} streams moved; gaps of the others up to {1e3 * gaps[-num_lost - 1]:.0f} ms")
            pauses += gaps[-num_lost:]
    pauses.sort()
    print(
        f"{len(pauses)} streams moved: pause {1e3 * statistics.median(pauses):.0f} ms in the median, "
        f"{1e3 * pauses[int(0.99 * len(pauses))]:.0f} ms at p99, {1e3 * pauses[-1]:.0f} ms at most"
    )


def wait_whole(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        while len(control.GetLoad(control_pb2.GetLoadRequest()).engines) < ENGINES:
            time.sleep(0.1)


async def run(address: str, killed: int, kill: Callable[[], None]) -> tuple[list[float], int]:
    """Kill an engine under streams. Return all streams' gaps at that time, in order, and how many the engine had."""
    times: list[list[float]] = [[] for _ in range(STREAMS)]
    async with grpc.aio.insecure_channel(address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)

        async def read(at: int) -> None:
            request = inference_pb2.GenerateRequest(
                prompt=f"stream {at}",
                sampling=inference_pb2.Sampling(temperature=0),
                stopping=inference_pb2.Stopping(max_tokens=TOKENS, ignore_eos=True),
            )
            async for response in inference.Generate(request):
                times[at].append(time.monotonic())
                num_tokens[at] += len(response.tokens.tokens)

        num_tokens = [0] * STREAMS
        tasks = [asyncio.create_task(read(at)) for at in range(STREAMS)]
        while min(num_tokens) < KILLED_AT:  # noqa: ASYNC110 (the tasks read them)
            await asyncio.sleep(0.01)
        load = await control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest())
        now = time.monotonic()
        kill()
        await asyncio.gather(*tasks)
    assert num_tokens == [TOKENS] * STREAMS
    gaps = [
        min(at for at in each if at > now) - max(at for at in each if at <= now) for each in times if each[-1] > now
    ]
    return sorted(gaps), load.engines[killed].running


if __name__ == "__main__":
    typer.run(main)
