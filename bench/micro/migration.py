"""`python -m bench.micro.migration`: how long streams pause when their engine is asked to end.

All streams run on one engine, which has computed their prompts before. A second one joins, and the first one gets
SIGTERM. In turns, the streams move with their blocks, or the first engine ends at once and the second one computes them
again. The pause of a stream is its longest gap between two messages from then on.

With --store, the first engine keeps the prompts' blocks in a file, and need not compute them in the next run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import grpc
import typer

from bench.micro.kv_store import wait_for_file
from bench.processes import spawned
from bench.systems import served
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

KINDS = {"moved": "--host-kv-gb 0.5 --grace-s 600", "computed again": "--host-kv-gb 0.5 --grace-s 0.01"}
BEGUN = 4  # tokens of each stream before the engine is asked to end
VOCAB_SIZE = 40_000  # ids below it are drawn
AFTER = 40  # tokens of each stream after all have moved


def main(
    streams: Annotated[int, typer.Option(help="Streams at once.")] = 64,
    tokens: Annotated[int, typer.Option(help="Length of each prompt, nearly.")] = 1000,
    turns: Annotated[int, typer.Option(help="Turns of each kind.")] = 2,
    model: Annotated[str, typer.Option(help="Model to serve.")] = "smollm2-135m-instruct",
    options: Annotated[str, typer.Option(help="The engines' options.")] = "--kv-cache-gb 2.4 --max-num-seqs 64",
    kinds: Annotated[list[str], typer.Option("--kind", help="Kinds to measure.")] = list(KINDS),  # noqa: B006 (it is read)
    store: Annotated[str, typer.Option(help="Folder for the prompts' blocks.")] = "",
) -> None:
    first = ["--kv-store", store] if store else []
    for turn in range(turns):
        for kind in kinds:
            both = [*options.split(), *KINDS[kind].split()]
            pauses, before, ended_s = measure(model, both, first, streams, tokens)
            print(
                f"turn {turn}, {kind}: pause {describe(pauses)}; ITL before {describe(before)}; "
                f"the engine ended after {ended_s:.1f} s",
                flush=True,
            )


def describe(seconds: list[float]) -> str:
    seconds = sorted(seconds)
    p99 = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
    return f"{statistics.median(seconds):.3f} s in the median, {p99:.3f} s at p99, {seconds[-1]:.3f} s at most"


def measure(
    model: str, options: list[str], first_options: list[str], streams: int, tokens: int
) -> tuple[list[float], list[float], float]:
    """Return the streams' pauses, the gaps between messages before, and the seconds until the engine has ended."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        addresses = [f"unix:{folder}/{name}.sock" for name in ("first", "second")]
        members = Path(folder, "engines")
        listed(members, addresses[:1])
        command = [sys.executable, "-m", "pagoda_server.engine", "--model", model, *options]
        first, _ = (
            stack.enter_context(spawned([*command, *own, "--listen", each], Path(folder, f"log{at}")))
            for at, (each, own) in enumerate(zip(addresses, (first_options, []), strict=True))
        )
        server = stack.enter_context(served(["--model", model, "--engine", f"file:{members}"]))
        ended_at = 0.0

        def leave() -> None:
            listed(members, addresses)
            wait_for_two(server.address)
            first.send_signal(signal.SIGTERM)

        def has_ended() -> bool:
            nonlocal ended_at
            if first.poll() is not None and not ended_at:
                ended_at = time.monotonic()
            return bool(ended_at)

        asyncio.run(compute(server.address, streams, tokens))
        if first_options:  # what a second request finds goes to the file
            asyncio.run(compute(server.address, streams, tokens))
            with grpc.insecure_channel(server.address) as channel:
                wait_for_file(channel)
        times, asked_at = asyncio.run(run(server.address, streams, tokens, leave, has_ended))
    gaps = [[(one, later - one) for one, later in itertools.pairwise(each)] for each in times]
    pauses = [max(gap for at, gap in each if at + gap > asked_at) for each in gaps]
    before = [gap for each in gaps for at, gap in each if at + gap <= asked_at]
    return pauses, before, ended_at - asked_at


def listed(path: Path, addresses: list[str]) -> None:
    entries = [{"name": Path(each).stem, "address": each} for each in addresses]
    path.with_suffix(".new").write_text(json.dumps({"engines": entries}))
    path.with_suffix(".new").rename(path)


def wait_for_two(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        while len(control.GetLoad(control_pb2.GetLoadRequest()).engines) < 2:
            time.sleep(0.1)


async def until(happens: Callable[[], bool]) -> None:
    while not happens():  # noqa: ASYNC110 (other tasks make it happen)
        await asyncio.sleep(0.02)


def ask(inference: inference_pb2_grpc.InferenceStub, at: int, tokens: int, max_tokens: int) -> grpc.aio.UnaryStreamCall:
    draw = random.Random(at)
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[draw.randrange(VOCAB_SIZE) for _ in range(tokens)]),
        sampling=inference_pb2.Sampling(temperature=0),
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
    )
    return inference.Generate(request)


async def compute(address: str, streams: int, tokens: int) -> None:
    """Have all prompts computed. Without streams beside it, a prompt gets whole steps."""
    async with grpc.aio.insecure_channel(address) as channel:
        for at in range(streams):
            async for _ in ask(inference_pb2_grpc.InferenceStub(channel), at, tokens, 1):
                pass


async def run(
    address: str, streams: int, tokens: int, leave: Callable[[], None], has_ended: Callable[[], bool]
) -> tuple[list[list[float]], float]:
    """Return when each stream's messages came, and when the engine was asked to end."""
    times: list[list[float]] = [[] for _ in range(streams)]
    async with grpc.aio.insecure_channel(address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)

        async def read(at: int) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                async for response in ask(inference, at, tokens, 1000):
                    if response.tokens.tokens:
                        times[at].append(time.monotonic())

        tasks = [asyncio.create_task(read(at)) for at in range(streams)]
        await until(lambda: min(map(len, times)) >= BEGUN)
        await asyncio.to_thread(leave)
        asked_at = time.monotonic()
        await until(has_ended)
        reached = [len(each) for each in times]
        await until(
            lambda: all(
                task.done() or len(each) >= count + AFTER
                for each, count, task in zip(times, reached, tasks, strict=True)
            )
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
    return times, asked_at


if __name__ == "__main__":
    typer.run(main)
