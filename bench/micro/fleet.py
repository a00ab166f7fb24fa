"""`python -m bench.micro.fleet`: how evenly routers load several engines, and what idle routers cost an engine.

Engines with the synthetic model pace their steps. In the first part, clients call two routers at random, so often that
the engines are busy to a given part; the load is what the engines report twice a second. In the second part a router's
end of the channel holds 64 sequences, alone and beside 16 others that hold none, in turns; the cost is the engine's CPU
time a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import grpc
import psutil
import typer

from bench.processes import spawned
from bench.systems import served
from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.router.engines.transport import EngineLink, transport_to

Engine: TypeAlias = tuple[str, int]  # its address and its process
PLACES = 32
TOKENS = (100, 300)
WARM_UP_S = 12.0
BUSY, STEPS, TURNS = 64, 600, 5


def main(
    engines: Annotated[int, typer.Option(help="Engines behind the routers.")] = 4,
    routers: Annotated[int, typer.Option(help="Routers.")] = 2,
    load: Annotated[float, typer.Option(help="Part of the engines' places that is in use.")] = 0.7,
    seconds: Annotated[float, typer.Option(help="Length of the first part.")] = 40.0,
    idle: Annotated[int, typer.Option(help="Routers without sequences, in the second part.")] = 16,
) -> None:
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(engine(PLACES, 25))[0] for _ in range(engines)]
        ports = [
            stack.enter_context(served(["--model", "synthetic", "--engine", ",".join(addresses)])).address
            for _ in range(routers)
        ]
        samples = asyncio.run(balance(ports, engines, load, seconds))
    means = [statistics.mean(each) for each in zip(*samples, strict=True)]
    ratios = sorted(max(each) / max(1, min(each)) for each in samples)
    print(f"{routers} routers, {engines} engines, {load:.0%} of the places: loads {[round(each, 1) for each in means]}")
    print(
        f"most ÷ least: {max(means) / min(means):.2f} of the means, {statistics.median(ratios):.2f} in the median of "
        f"{len(ratios)} samples, {ratios[int(0.9 * len(ratios))]:.2f} in the ninth of ten"
    )
    for transport in ("shm", "unix"):
        with engine(BUSY, 5, transport) as (address, pid):
            found = asyncio.run(turns(address, pid, idle))
        alone, beside = (1e3 * statistics.median(each) for each in zip(*found, strict=True))
        ratio = statistics.median(b / a for a, b in found)
        print(
            f"{transport}: CPU of a step {alone:.2f} ms alone, {beside:.2f} beside {idle} idle routers, × {ratio:.2f}"
        )


@contextlib.contextmanager
def engine(places: int, step_ms: int, transport: str = "unix") -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        address = f"{transport}:{folder}/engine.sock"
        options = ("--model", "synthetic", "--step-ms", str(step_ms), "--max-num-seqs", str(places))
        with spawned(
            [sys.executable, "-m", "pagoda_server.engine", "--listen", address, *options], Path(folder, "log")
        ) as process:
            while not Path(folder, "engine.sock").exists():
                time.sleep(0.05)
            yield address, process.pid


async def balance(routers: list[str], engines: int, load: float, seconds: float) -> list[list[int]]:
    """The sequences in each engine, twice a second."""
    draw = random.Random(1)
    rate = engines * PLACES * load / (sum(TOKENS) / 2 * 0.025)
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(each)) for each in routers]
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        control = control_pb2_grpc.ControlStub(channels[0])

        async def call() -> None:
            stopping = inference_pb2.Stopping(max_tokens=draw.randint(*TOKENS), ignore_eos=True)
            request = inference_pb2.GenerateRequest(prompt=str(draw.random()), stopping=stopping)
            async for _ in draw.choice(stubs).Generate(request):
                pass

        began = due = time.monotonic()
        samples: list[list[int]] = []
        calls: set[asyncio.Task[None]] = set()
        while (now := time.monotonic()) < began + seconds:
            due += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, due - now))
            calls.add(task := asyncio.create_task(call()))
            task.add_done_callback(calls.discard)
            if now > began + WARM_UP_S + 0.5 * len(samples):
                found = await control.GetLoad(control_pb2.GetLoadRequest())
                samples.append([each.running + each.waiting for each in found.engines])
        for task in calls:
            task.cancel()
        return samples


async def turns(address: str, pid: int, idle: int) -> list[tuple[float, float]]:
    """CPU seconds of a step, alone and beside idle routers, in each turn."""
    found = []
    async with connected(address) as link:
        for turn in range(TURNS):
            alone = await cost_of_step(link, 2 * turn, pid)
            async with contextlib.AsyncExitStack() as stack:
                others = [await stack.enter_async_context(connected(address)) for _ in range(idle)]
                readers = [asyncio.create_task(read(each)) for each in others]
                found.append((alone, await cost_of_step(link, 2 * turn + 1, pid)))
                for reader in readers:
                    reader.cancel()
                await asyncio.gather(*readers, return_exceptions=True)
    return found


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[EngineLink]:
    transport = transport_to(address)
    link = await transport.connect()
    await link.read()
    try:
        yield link
    finally:
        link.close()
        await transport.close()


async def read(link: EngineLink) -> None:
    while await link.read() is not None:
        pass


async def cost_of_step(link: EngineLink, round: int, pid: int) -> float:
    process, first = psutil.Process(pid), 1 + 1000 * round
    before = process.cpu_times()
    for number in range(first, first + BUSY):
        submit = engine_pb2.Submit(
            first_sequence=number, prompt=[1, 2, 3], sampling=inference_pb2.Sampling(n=1), max_tokens=STEPS
        )
        await link.write(engine_pb2.RouterMessage(submit=submit))
    ended = 0
    while ended < BUSY:
        message = await link.read()
        assert message is not None, "the engine has ended"
        ended += len(message.step.ended)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / STEPS


if __name__ == "__main__":
    typer.run(main)
