"""A router and engines of this version, each before a peer that speaks the channel's protocol of an earlier one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc, trace_pb2
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import Answer, request
from tests.servers import running_engine, running_server

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

# Descriptors of the engine's protocol as it was before EngineInfo.protocol_version, made from its protos by
# `protoc --include_imports --descriptor_set_out`. It never changes.
IMAGE = Path(__file__).parent.parent / "vectors" / "channel_protocol_0.binpb"
CONNECT = "/pagoda.engine.v1.Engine/Connect"
MODEL = ("--model", "synthetic")
ENGINE = (*MODEL, "--step-ms", "10", "--grace-s", "1")
STREAMS, TOKENS = 16, 200


def old_types() -> tuple[type[Message], type[Message]]:
    """RouterMessage and EngineMessage of the earlier version."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(IMAGE.read_bytes()).file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    names = ("pagoda.engine.v1.RouterMessage", "pagoda.engine.v1.EngineMessage")
    router, engine = (message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names)  # type: ignore[no-untyped-call]
    return router, engine


class Past:
    """Stands between a router and an engine, and lets pass what the earlier version knows: to each, the other is old.

    passed   the kinds of messages that an earlier version knows
    unknown  the kinds that it does not know, which nobody may send to it: an earlier engine drops the router then
    """

    def __init__(self, address: str, engine: str) -> None:
        self.passed: Counter[str | None] = Counter()
        self.unknown: Counter[str | None] = Counter()
        self.lost_fields = 0
        self._engine = engine
        self._server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(self._connect)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("pagoda.engine.v1.Engine", {"Connect": handler}),)
        )
        self._server.add_insecure_port(address)
        self._router_message, self._engine_message = old_types()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Past]:
        await self._server.start()
        try:
            yield self
        finally:
            await self._server.stop(None)

    async def _connect(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with grpc.aio.insecure_channel(self._engine) as channel:
            call = channel.stream_stream(CONNECT)()

            async def to_engine() -> None:
                async for message in requests:
                    await call.write(self._as_before(self._router_message, engine_pb2.RouterMessage, message))
                await call.done_writing()

            writing = asyncio.create_task(to_engine())
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    await context.write(self._as_before(self._engine_message, engine_pb2.EngineMessage, message))
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
            finally:
                writing.cancel()
                call.cancel()

    def _as_before(self, old: type[Message], new: type[Message], raw: bytes) -> bytes:
        known = old.FromString(raw)
        known.DiscardUnknownFields()  # type: ignore[no-untyped-call]
        filtered = known.SerializeToString(deterministic=True)
        if kind := known.WhichOneof("message"):
            self.passed[kind] += 1
        else:
            self.unknown[new.FromString(raw).WhichOneof("message")] += 1
        self.lost_fields += len(filtered) < len(raw)
        return filtered


async def until_ready(control: control_pb2_grpc.ControlStub, count: int) -> None:
    async with asyncio.timeout(120):
        while len((await control.GetLoad(control_pb2.GetLoadRequest())).engines) != count:  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
async def test_streams_run_and_fail_over_between_this_version_and_an_earlier_one(
    tmp_path: Path, ending: signal.Signals
) -> None:
    engines = [f"unix:{tmp_path / name}.sock" for name in ("one", "two")]
    seen = [f"unix:{tmp_path / name}.old.sock" for name in ("one", "two")]
    async with contextlib.AsyncExitStack() as stack:
        processes = [stack.enter_context(running_engine(address, *ENGINE)) for address in engines]
        pasts = [await stack.enter_async_context(Past(*pair).running()) for pair in zip(seen, engines, strict=True)]
        arguments = (*MODEL, "--engine", ",".join(seen))
        server = stack.enter_context(running_server(*arguments, ready=False))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
        control, inference = control_pb2_grpc.ControlStub(channel), inference_pb2_grpc.InferenceStub(channel)
        await until_ready(control, 2)
        began = asyncio.Semaphore(0)

        async def stream(number: int) -> None:
            responses = []
            async for response in inference.Generate(request(f"stream {number}", TOKENS), timeout=100):
                responses.append(response)
                if len(responses) == 20:
                    began.release()
            assert Answer(responses).ids() == expected_tokens(f"stream {number}".encode(), TOKENS, 258)

        streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
        for _ in streams:
            await began.acquire()
        assert all(past.passed["submit"] for past in pasts), "both engines have streams"
        processes[0].send_signal(ending)
        await asyncio.gather(*streams)
        async for part in control.GetStepTrace(trace_pb2.GetStepTraceRequest()):
            assert part.engine == 1
        assert server.stop() == 0
    for past in pasts:
        assert not past.unknown
        assert {"hello", "ping", "pong", "submit", "step"} <= past.passed.keys()
        assert past.lost_fields, "each end has sent fields that the other does not know"
