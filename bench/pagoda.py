"""Drives a Pagoda server over gRPC, as clients do: one call a request, all on one connection."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.measure import RequestTimes, Result
from bench.workloads import Request, Workload
from protos import inference_pb2, inference_pb2_grpc

START_TIMEOUT_S = 120.0


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[str]:
    """`pagoda serve` on a free port, until the block ends; yields its address once it is ready."""
    command = [sys.executable, "-m", "clients.cli", "serve", "--listen", "127.0.0.1:0", "--log-level", "warning"]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise RuntimeError(f"the server did not start: {line!r}")
        address = line.split()[-1]
        wait_ready(address, process)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def wait_ready(address: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                if stub.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.1)
    raise RuntimeError("the server did not become ready")


def run(address: str, workload: Workload) -> Result:
    return asyncio.run(_run(address, workload))


async def _run(address: str, workload: Workload) -> Result:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await _generate(stub, Request(workload.requests[0].prompt[:8], 4), time.perf_counter())  # connects and warms up
        started = time.perf_counter()
        times = await asyncio.gather(*(_generate(stub, request, started) for request in workload.requests))
        elapsed_s = time.perf_counter() - started
    counts = [len(request_times.arrivals) for request_times in times]
    if counts != [request.output_len for request in workload.requests]:
        raise RuntimeError("the server did not generate what was asked of it")
    return Result("pagoda", sum(counts), elapsed_s, list(times))


async def _generate(stub: inference_pb2_grpc.InferenceStub, request: Request, started: float) -> RequestTimes:
    message = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=request.prompt),
        stopping=inference_pb2.Stopping(max_tokens=request.output_len, ignore_eos=True),
        cache=inference_pb2.Cache(bypass=True),  # repetitions measure the same work
    )
    submitted = time.perf_counter() - started
    arrivals: list[float] = []
    async for response in stub.Generate(message):
        if response.HasField("tokens"):
            arrivals += [time.perf_counter() - started] * len(response.tokens.tokens)
    return RequestTimes(submitted, arrivals)
