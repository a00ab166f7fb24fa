"""`python -m bench.micro.roles`: ITL of running streams beside long prompts that another engine computes.

The streams run on an engine for answers, and prompts on an engine for prompts, with one thread each. In turns nothing
else is asked, or a long prompt for two tokens: the first engine then fetches its blocks, and computes the second token.
A window's ITL is the mean over all tokens of its streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated

import grpc
import typer

from bench.micro.migration import VOCAB_SIZE, listed
from bench.processes import spawned
from bench.systems import served
from pagoda.v1 import inference_pb2, inference_pb2_grpc

ROLES = ("prefill", "decode")
WARM_S = 3.0  # until the windows begin


def main(
    streams: Annotated[int, typer.Option(help="Streams at once.")] = 4,
    tokens: Annotated[int, typer.Option(help="Length of the long prompts.")] = 4096,
    turns: Annotated[int, typer.Option(help="Long prompts, each between two windows without any.")] = 4,
    seconds: Annotated[float, typer.Option(help="Length of a window without long prompts.")] = 6.0,
    model: Annotated[str, typer.Option(help="Model to serve.")] = "smollm2-135m-instruct",
    options: Annotated[
        str, typer.Option(help="The engines' options.")
    ] = "--threads 1 --kv-cache-gb 1 --host-kv-gb 0.5",
    nice: Annotated[int, typer.Option(help="How much the engine for prompts gives way to others.")] = 0,
) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        addresses = {role: f"unix:{folder}/{role}.sock" for role in ROLES}
        members = Path(folder, "engines")
        listed(members, list(addresses.values()))
        for role, address in addresses.items():
            command = [sys.executable, "-m", "pagoda_server.engine", "--model", model, *options.split()]
            first = ["nice", "-n", str(nice)] if role == "prefill" and nice else []
            stack.enter_context(
                spawned([*first, *command, "--role", role, "--listen", address], Path(folder, f"log-{role}"))
            )
        server = stack.enter_context(served(["--model", model, "--engine", f"file:{members}"]))
        calm, beside = asyncio.run(run(server.address, streams, tokens, turns, seconds))
    around = [(before + after) / 2 for (before, _), (after, _) in itertools.pairwise(calm)]
    ratios = [mean / other for (mean, _), other in zip(beside, around, strict=True)]
    print(f"beside ÷ undisturbed: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


async def run(
    address: str, streams: int, tokens: int, turns: int, seconds: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return mean and 99th percentile of ITL in the windows without long prompts, and in those between them."""
    times: list[list[float]] = [[] for _ in range(streams)]
    async with grpc.aio.insecure_channel(address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)

        def ask(seed: int, num_tokens: int, max_tokens: int) -> grpc.aio.UnaryStreamCall:
            draw = random.Random(seed)
            return inference.Generate(
                inference_pb2.GenerateRequest(
                    token_ids=inference_pb2.TokenIds(ids=[draw.randrange(VOCAB_SIZE) for _ in range(num_tokens)]),
                    sampling=inference_pb2.Sampling(temperature=0),
                    stopping=inference_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
                )
            )

        async def read(at: int) -> None:
            async for response in ask(at, 32, 7000):
                times[at] += [time.monotonic()] * len(response.tokens.tokens)

        async def ask_long(turn: int) -> None:
            async for response in ask(1000 + turn, tokens, 2):
                if response.HasField("timing"):
                    timing = response.timing
                    print(f"  prompt: {timing.time_to_first_token_s:.2f} s, {timing.pulled_tokens} tokens fetched")

        async def window(what: str, meanwhile: Awaitable[None]) -> tuple[float, float]:
            begun = time.monotonic()
            await meanwhile
            ended = time.monotonic()
            gaps = sorted(
                after - before
                for each in times
                for before, after in itertools.pairwise(each)
                if begun <= before and after <= ended
            )
            mean, p99 = statistics.fmean(gaps), gaps[int(0.99 * len(gaps))]
            print(f"{what}: ITL {1e3 * mean:.2f} ms, p99 {1e3 * p99:.1f}, most {1e3 * gaps[-1]:.1f}", flush=True)
            return mean, p99

        tasks = [asyncio.create_task(read(at)) for at in range(streams)]
        await asyncio.sleep(WARM_S)
        await ask_long(-1)
        calm, beside = [], []
        for turn in range(turns):
            calm.append(await window("undisturbed", asyncio.sleep(seconds)))
            beside.append(await window("beside a prompt", ask_long(turn)))
        calm.append(await window("undisturbed", asyncio.sleep(seconds)))
        if any(task.done() for task in tasks):
            raise SystemExit("the streams have ended: ask for fewer turns")
        for task in tasks:
            task.cancel()
    return calm, beside


if __name__ == "__main__":
    typer.run(main)
