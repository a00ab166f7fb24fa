"""`python -m bench.micro.start MODEL …`: what a start costs, from `pagoda serve` to the first token of a call.

Models take turns, so that other work on the machine meets all of them. A client asks again every few milliseconds until
the server answers. Processor time is what stays comparable on a busy machine.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
import psutil
import typer

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_server.checkpoints import resolve
from tests.servers import Server, free_address, running_server

ASKS_EVERY_S = 0.005
OPTIONS = ("--kv-cache-gb", "0.05")
RECONNECTS = [(f"grpc.{name}_reconnect_backoff_ms", 5) for name in ("initial", "min", "max")]


@dataclass(frozen=True, slots=True)
class Start:
    """
    first_s   from the start of the command to the first token
    engine_s  processor time of the engine until then; router_s likewise, of the command that became the router
    resident  bytes of the engine then; peak: the most that it has had
    """

    first_s: float
    engine_s: float
    router_s: float
    resident: int
    peak: int


def measure(model: str) -> Start:
    address, started = free_address(), time.monotonic()
    with (
        running_server("--listen", address, "--model", model, *OPTIONS, ready=False) as server,
        grpc.insecure_channel(address, options=RECONNECTS) as channel,
    ):
        wait_for_token(server, inference_pb2_grpc.InferenceStub(channel))
        first_s = time.monotonic() - started
        engine, router = server.engine(), psutil.Process(server.process.pid)
        status = Path(f"/proc/{engine.pid}/status").read_text()
        (peak,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        return Start(first_s, cpu_s(engine), cpu_s(router), engine.memory_info().rss, 1024 * peak)


def wait_for_token(server: Server, inference: inference_pb2_grpc.InferenceStub) -> None:
    request = inference_pb2.GenerateRequest(
        prompt="Hello", stopping=inference_pb2.Stopping(max_tokens=1, ignore_eos=True)
    )
    while True:
        try:
            if any(response.HasField("tokens") for response in inference.Generate(request)):
                return
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        if server.process.poll() is not None:
            raise SystemExit(server.tail())
        time.sleep(ASKS_EVERY_S)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main(
    models: Annotated[list[str], typer.Argument(help="Names, folders or .gguf files.")],
    turns: Annotated[int, typer.Option(help="Starts of each model.")] = 5,
) -> None:
    for model in models:
        resolve(model)  # an import is no part of a start
    starts = [[measure(model) for model in models] for _ in range(turns)]
    print("| model | first token, median (least) | engine, CPU | router, CPU | engine resident | peak | load |")
    print("|---|---|---|---|---|---|---|")
    for model, of_model in zip(models, zip(*starts, strict=True), strict=True):
        first, engine, router = (
            [getattr(start, name) for start in of_model] for name in ("first_s", "engine_s", "router_s")
        )
        print(
            f"| {Path(model).name} | {statistics.median(first):.2f} s ({min(first):.2f}) "
            f"| {statistics.median(engine):.2f} s | {statistics.median(router):.2f} s "
            f"| {max(start.resident for start in of_model) / 1e6:.0f} MB "
            f"| {max(start.peak for start in of_model) / 1e6:.0f} MB | {os.getloadavg()[0]:.1f} |"
        )


if __name__ == "__main__":
    typer.run(main)
