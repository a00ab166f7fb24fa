"""Watches a server's load while a workload runs: steps, and how its KV cache is used."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import numpy as np

from bench.measure import KVUse
from pagoda.v1 import control_pb2, control_pb2_grpc

INTERVAL_S = 0.1


class KVWatch:
    """From the block's beginning to its end. `steps` and `use` are there afterwards."""

    def __init__(self, control: control_pb2_grpc.ControlStub, block_size: int) -> None:
        self.steps = 0
        self._control = control
        self._block_size = block_size
        self._samples: list[control_pb2.EngineLoad] = []

    @property
    def use(self) -> KVUse | None:
        """None if no sample found a sequence at work."""
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
        async for load in self._control.WatchLoad(control_pb2.WatchLoadRequest(interval_s=INTERVAL_S)):
            self._samples += load.engines


def kv_use(samples: list[control_pb2.EngineLoad], block_size: int) -> KVUse | None:
    busy = [load for load in samples if load.blocks_referenced]
    if not busy:
        return None
    referenced = np.array([load.blocks_referenced for load in busy])
    occupancy = referenced / np.array([load.blocks_total for load in busy])
    unused = sum(load.kv_slots_unused for load in busy)
    return KVUse(float(occupancy.mean()), float(occupancy.max()), unused / (int(referenced.sum()) * block_size))
