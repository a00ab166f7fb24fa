"""The call of a client that reads nothing is ended; that of a slow reader is not."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from pagoda.v1 import inference_pb2
from pagoda_server.router.errors import ResourceExhausted
from pagoda_server.router.request.client_call import ClientCall
from pagoda_server.router.request.output import ClientWriter

pytestmark = pytest.mark.usefixtures("virtual_time")

RESPONSE = inference_pb2.GenerateResponse()


class SlowContext:
    """Takes a number of seconds to write a message."""

    def __init__(self, write_s: float) -> None:
        self._write_s = write_s

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        await asyncio.sleep(self._write_s)


def writer(write_s: float, stall_timeout_s: float) -> ClientWriter:
    return ClientWriter(cast(ClientCall, SlowContext(write_s)), stall_timeout_s)


async def test_a_write_that_is_not_read_ends_the_call_after_the_stall_timeout() -> None:
    async def call() -> None:
        async with writer(60, 0.1) as client:
            await asyncio.sleep(0.05)
            await client.write(RESPONSE)

    started = asyncio.get_running_loop().time()
    with pytest.raises(ResourceExhausted, match=r"read nothing for 0\.1 s"):
        await call()
    assert asyncio.get_running_loop().time() - started == pytest.approx(0.15)


async def test_slow_writes_and_a_long_pause_between_them_are_no_stall() -> None:
    async with writer(0.06, 0.1) as client:
        for _ in range(4):
            await client.write(RESPONSE)
        await asyncio.sleep(0.25)
        await client.write(RESPONSE)


async def test_a_call_cancelled_by_its_client_ends_as_cancelled() -> None:
    async def call() -> None:
        async with writer(60, 10) as client:
            await client.write(RESPONSE)

    task = asyncio.create_task(call())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
