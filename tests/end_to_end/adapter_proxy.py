"""A proxy before an engine that holds adapters in its place, and fails at it when a test asks for that.

The engine computes every request with its base model: these tests are about which engine gets it, and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc
from pagoda.v1 import control_pb2

MAX_LOADED = 4
Fault = engine_pb2.AdapterError


class AdapterProxy(engine_pb2_grpc.EngineServicer):
    """
    held       by name, as long as the engine lives
    submitted  counts requests by the identity of their adapter
    faults     by path: what loads of it end with
    loads      counts them by path
    may_load   loads wait until it is set; loads_waiting counts them
    is_silent  it reports no changes
    calls      by connection of a router, what it is still to be sent
    """

    def __init__(self, address: str, engine: str) -> None:
        self.held: dict[str, engine_pb2.Adapter] = {}
        self.submitted: Counter[bytes] = Counter()
        self.faults: dict[str, engine_pb2.AdapterError] = {}
        self.loads: Counter[str] = Counter()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.loads_waiting = 0
        self.is_silent = False
        self._engine = engine
        self._epoch = 0
        self.calls: dict[Any, asyncio.Queue[engine_pb2.EngineMessage]] = {}
        self._server = grpc.aio.server()
        engine_pb2_grpc.add_EngineServicer_to_server(self, self._server)
        self._server.add_insecure_port(address)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[AdapterProxy]:
        await self._server.start()
        try:
            yield self
        finally:
            await self._server.stop(None)

    def cut(self) -> None:
        """Cut every connection of a router. The engine lives on."""
        for call in list(self.calls):
            call.cancel()

    async def Connect(self, requests: AsyncIterator[engine_pb2.RouterMessage], context: Any) -> None:
        out = asyncio.Queue[engine_pb2.EngineMessage]()
        async with grpc.aio.insecure_channel(self._engine) as channel:
            call = engine_pb2_grpc.EngineStub(channel).Connect()
            self.calls[call] = out
            parts = [asyncio.create_task(each) for each in (self._down(requests, call, out), self._up(call, out))]
            parts.append(asyncio.create_task(self._write(context, out)))
            try:
                await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            finally:
                del self.calls[call]
                call.cancel()
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is gone")

    async def _write(self, context: Any, out: asyncio.Queue[engine_pb2.EngineMessage]) -> None:
        while True:
            await context.write(await out.get())

    async def _up(self, call: Any, out: asyncio.Queue[engine_pb2.EngineMessage]) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.HasField("hello"):
                if message.epoch != self._epoch:
                    self._epoch = message.epoch
                    self.held.clear()
                message.adapter_limits.CopyFrom(
                    engine_pb2.AdapterLimits(max_adapters=2, max_loaded=MAX_LOADED, max_rank=64)
                )
            out.put_nowait(message)

    async def _down(
        self, requests: AsyncIterator[engine_pb2.RouterMessage], call: Any, out: asyncio.Queue[Any]
    ) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "load_adapter":
                    self.loads_waiting += 1
                    await self.may_load.wait()
                    self.loads_waiting -= 1
                    out.put_nowait(self._answered(message.load_adapter.number, self._load(message.load_adapter)))
                    self.report()
                case "unload_adapter":
                    gone = self.held.pop(message.unload_adapter.name, None)
                    fault = Fault(fault=engine_pb2.ADAPTER_FAULT_NOT_FOUND, detail="no such adapter")
                    out.put_nowait(self._answered(message.unload_adapter.number, gone or fault))
                    self.report()
                case "follow_adapters":
                    out.put_nowait(self._message(adapters=engine_pb2.Adapters(held=self.held.values())))
                case "submit" if message.submit.adapter:
                    identity = message.submit.adapter
                    self.submitted[identity] += 1
                    message.submit.ClearField("adapter")
                    if any(each.identity == identity for each in self.held.values()):
                        await call.write(message)
                        continue
                    ended = engine_pb2.Ended(
                        sequence=message.submit.first_sequence, reason=engine_pb2.END_REASON_REJECTED, field="adapter"
                    )
                    load = control_pb2.EngineLoad()
                    out.put_nowait(self._message(step=engine_pb2.StepOutput(ended=[ended], load=load)))
                case _:
                    await call.write(message)

    def _load(self, load: engine_pb2.LoadAdapter) -> engine_pb2.Adapter | engine_pb2.AdapterError:
        self.loads[load.path] += 1
        if load.path in self.faults:
            return self.faults[load.path]
        try:
            content = (Path(load.path) / "adapter_model.safetensors").read_bytes()
        except OSError:
            return Fault(fault=engine_pb2.ADAPTER_FAULT_NOT_FOUND, detail="nothing is there")
        identity = hashlib.sha256(content).digest()
        if load.identity not in (b"", identity):
            return Fault(fault=engine_pb2.ADAPTER_FAULT_CHANGED, detail="the files have changed")
        if load.keeps_other and load.name in self.held and self.held[load.name].identity != identity:
            return Fault(fault=engine_pb2.ADAPTER_FAULT_TAKEN, detail="another adapter has the name; replace it")
        if len({*self.held, load.name}) > MAX_LOADED:
            return Fault(fault=engine_pb2.ADAPTER_FAULT_FULL, detail=f"{MAX_LOADED} adapters are loaded")
        found = engine_pb2.Adapter(
            name=load.name, identity=identity, rank=8, num_bytes=len(content), is_pinned=load.is_pinned, path=load.path
        )
        self.held[load.name] = found
        return found

    def report(self) -> None:
        for out in () if self.is_silent else self.calls.values():
            out.put_nowait(self._message(adapters=engine_pb2.Adapters(held=self.held.values())))

    def _answered(self, number: int, result: engine_pb2.Adapter | engine_pb2.AdapterError) -> engine_pb2.EngineMessage:
        answer = engine_pb2.AdapterAnswer(number=number)
        (answer.error if isinstance(result, engine_pb2.AdapterError) else answer.adapter).CopyFrom(result)  # type: ignore[arg-type]
        return self._message(adapter_answer=answer)

    def _message(self, **content: Any) -> engine_pb2.EngineMessage:
        return engine_pb2.EngineMessage(epoch=self._epoch, **content)
