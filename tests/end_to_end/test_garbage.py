"""A request leaves no cycle of references: collecting those of a crowd held up all streams for 50 ms and more."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections import Counter
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_server.checkpoints import find_model
from pagoda_server.router.process.workers import Workers
from pagoda_server.runtime import event_loop
from pagoda_server.settings import ServeConfig
from tests.servers import free_address

pytestmark = pytest.mark.thorough

REQUESTS = 20


async def ask_over_http(address: str, **options: object) -> None:
    host, _, port = address.rpartition(":")
    chat = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3, **options}
    body = json.dumps(chat).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
    writer.close()


async def ask(inference: inference_pb2_grpc.InferenceAsyncStub) -> None:
    request = inference_pb2.GenerateRequest(prompt="Hello!")
    request.stopping.max_tokens = 3
    async for _ in inference.Generate(request):
        pass


@pytest.mark.parametrize("way", ["grpc", "http", "sse"])
def test_requests_leave_nothing_to_the_garbage_collector(way: str) -> None:
    address, http = free_address(), free_address()
    config = ServeConfig(model="synthetic", served_model_name="synthetic", listen=address, http=http, log_level="error")

    async def main(folder: Path) -> None:
        server = asyncio.create_task(Workers(config, {"synthetic": folder}).run())
        async with grpc.aio.insecure_channel(address) as channel:
            health, inference = health_pb2_grpc.HealthStub(channel), inference_pb2_grpc.InferenceStub(channel)
            check = health_pb2.HealthCheckRequest()
            async with asyncio.timeout(120):
                serving = health_pb2.HealthCheckResponse.SERVING
                while (await health.Check(check, wait_for_ready=True)).status != serving:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

            async def ask_all() -> None:
                each = {
                    "grpc": lambda: ask(inference),  # type: ignore[arg-type]
                    "http": lambda: ask_over_http(http),
                    "sse": lambda: ask_over_http(http, stream=True),
                }
                await asyncio.gather(*(each[way]() for _ in range(REQUESTS)))
                await asyncio.sleep(0.1)  # the server's ends of their connections close

            await ask_all()
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                await ask_all()
                gc.collect()
                ours = [type(each) for each in gc.garbage if type(each).__module__.startswith("pagoda_server.router")]
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await server
        assert not Counter(ours)

    event_loop.run(main(find_model(config.model).folder))
