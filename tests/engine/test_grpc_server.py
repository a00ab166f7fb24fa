"""What comes of calls that are open when an engine stops."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc
from pagoda_server.channel.link import Link
from pagoda_server.engine.serving.block_lender import ADDRESS_BYTES, Lent
from pagoda_server.engine.serving.grpc_server import GrpcServer
from pagoda_server.engine.serving.server import EngineServer
from pagoda_server.runtime.channel_trust import ChannelTrust
from pagoda_server.settings import EngineConfig

LENT = Lent(layout=b"layout", bytes_per_block=64, most=1)


class Engine:
    """Sends each router more than it reads, and answers no call for blocks."""

    is_leaving = False

    def __init__(self) -> None:
        self.has_router, self.has_borrower = asyncio.Event(), asyncio.Event()

    async def loop_answers(self) -> None:
        pass

    async def serve(self, link: Link[engine_pb2.RouterMessage, engine_pb2.EngineMessage]) -> None:
        self.has_router.set()
        await asyncio.gather(link.read(), link.write(engine_pb2.EngineMessage(block_layout=bytes(32 << 20))))

    async def lend(self, addresses: list[bytes]) -> list[bytes]:
        self.has_borrower.set()
        return await asyncio.Future()


async def test_an_engine_that_stops_ends_open_calls_and_logs_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, config = Engine(), EngineConfig(model="synthetic", listen=f"unix:{tmp_path / 'engine.sock'}")
    trust = ChannelTrust(config, is_engine=True)
    server = GrpcServer(config.listen, cast(EngineServer, engine), 60.0, trust, LENT)
    await server.start()
    async with asyncio.timeout(60), grpc.aio.insecure_channel(config.listen) as channel:
        connect = engine_pb2_grpc.EngineStub(channel).Connect()  # nothing reads its answers
        await engine.has_router.wait()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        asked = engine_pb2.FetchRequest(layout=LENT.layout, addresses=[bytes(ADDRESS_BYTES)])
        fetch = engine_pb2_grpc.BlocksStub(channel).Fetch(asked)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await engine.has_borrower.wait()
        await server.stop()
        assert [await watch.code(), await fetch.code()] == [grpc.StatusCode.UNAVAILABLE] * 2
        connect.cancel()
    gc.collect()  # asyncio logs an unread exception when it drops its task
    await asyncio.sleep(0)
    assert not [record for record in caplog.records if record.exc_info]
