"""Drive a Pagoda server over gRPC as clients do, one call per request, all on one connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import numpy as np
import uvloop

from bench import BenchError
from bench.measure import KVUse, RequestTimes, Run
from bench.workloads import Request, Workload
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

OnTokens = Callable[[int], None]  # called with the number of tokens that have just arrived
LOAD_INTERVAL_S = 0.1  # between samples of the server's load
WARM_UP = Request([1, 2, 3, 4, 5, 6, 7, 8], 4)


def run(address: str, workload: Workload, on_tokens: OnTokens) -> Run:
    """Send each of the workload's requests when it is due. Raise BenchError if the server fails one."""
    try:
        return uvloop.run(_run(address, workload, on_tokens))
    except grpc.RpcError as error:
        raise BenchError(f"{address}: {error.code().name}: {error.details()}") from error


def versions(address: str) -> dict[str, str]:
    """Return what a server reports of itself: version, model, device, KV cache."""
    with grpc.insecure_channel(address) as channel:
        info = control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())
    engine = info.engines[0].info
    return {
        "pagoda": info.version,
        "model": engine.model,
        "device": engine.device,
        "dtype": engine.dtype,
        "kernels": engine.kernel_backend,
        "kv_cache_tokens": str(engine.kv_cache.token_capacity),
    }


async def _run(address: str, workload: Workload, on_tokens: OnTokens) -> Run:
    async with grpc.aio.insecure_channel(address) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        info = await control.GetServerInfo(control_pb2.GetServerInfoRequest())
        calls = _Calls(inference_pb2_grpc.InferenceStub(channel), on_tokens, bypass_cache=not workload.reuses_prefixes)
        await calls.generate(WARM_UP)  # connects, too
        async with KVWatch(control, info.engines[0].info.kv_cache.block_size) as watch:
            calls.start()
            times = await asyncio.gather(*(calls.generate_when_due(request) for request in workload.requests))
        return Run(times, watch.steps, watch.use)


@dataclass
class _Calls:
    stub: inference_pb2_grpc.InferenceStub
    on_tokens: OnTokens
    bypass_cache: bool
    started: float = 0.0

    def start(self) -> None:
        self.started = time.perf_counter()

    async def generate_when_due(self, request: Request) -> RequestTimes:
        await asyncio.sleep(request.arrival_s - (time.perf_counter() - self.started))
        return RequestTimes(request.arrival_s, await self.generate(request), request.kind, len(request.prompt))

    async def generate(self, request: Request) -> list[float]:
        """Return when each token arrived, in seconds since the start."""
        message = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=request.prompt),
            sampling=inference_pb2.Sampling(temperature=0),
            stopping=inference_pb2.Stopping(max_tokens=request.output_len, ignore_eos=True),
            cache=inference_pb2.Cache(bypass=self.bypass_cache),
            lora_name=request.adapter,
        )
        arrivals: list[float] = []
        async for response in self.stub.Generate(message):
            if response.HasField("tokens"):
                count = len(response.tokens.tokens)
                arrivals += [time.perf_counter() - self.started] * count
                self.on_tokens(count)
        if len(arrivals) != request.output_len:
            raise BenchError(f"the server generated {len(arrivals)} tokens where {request.output_len} were requested")
        return arrivals


class KVWatch:
    """Watch a server's load inside an `async with` block; `steps` and `use` are valid after it."""

    def __init__(self, control: control_pb2_grpc.ControlStub, block_size: int) -> None:
        self.steps = 0
        self._control = control
        self._block_size = block_size
        self._samples: list[control_pb2.EngineLoad] = []

    @property
    def use(self) -> KVUse | None:
        """How the KV cache was used; None if no sample found a running sequence."""
        return kv_use(self._samples, self._block_size)

    async def __aenter__(self) -> KVWatch:
        self.steps = -await self._count_steps()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
            await self._task
        self.steps += await self._count_steps()

    async def _count_steps(self) -> int:
        load = await self._control.GetLoad(control_pb2.GetLoadRequest())
        return sum(engine.steps for engine in load.engines)

    async def _watch(self) -> None:
        async for load in self._control.WatchLoad(control_pb2.WatchLoadRequest(interval_s=LOAD_INTERVAL_S)):
            self._samples += load.engines


def kv_use(samples: list[control_pb2.EngineLoad], block_size: int) -> KVUse | None:
    busy = [load for load in samples if load.blocks_referenced]
    if not busy:
        return None
    referenced = np.array([load.blocks_referenced for load in busy])
    occupancy = referenced / np.array([load.blocks_total for load in busy])
    unused = sum(load.kv_slots_unused for load in busy)
    return KVUse(float(occupancy.mean()), float(occupancy.max()), unused / (int(referenced.sum()) * block_size))
