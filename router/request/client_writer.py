"""Writes one call's responses to its client, and gives up a client that reads nothing."""

from __future__ import annotations

import asyncio
import math
import time
from types import TracebackType
from typing import TypeAlias

import grpc

from pagoda.v1 import inference_pb2
from pagoda_server.router.errors import ResourceExhausted

GenerateContext: TypeAlias = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class ClientWriter:
    """A context manager around everything that writes.

    One timer a call looks after its writes: a timeout for each of them would cost as much as building its message.
    """

    def __init__(self, context: GenerateContext, stall_timeout_s: float) -> None:
        self._context = context
        self._stall_timeout_s = stall_timeout_s
        self._write_began = math.inf  # while none is under way
        self._timeout = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> ClientWriter:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._stall_timeout_s, self._check)
        return self

    async def write(self, response: inference_pb2.GenerateResponse) -> None:
        """The response may be used again afterwards."""
        self._write_began = time.monotonic()
        await self._context.write(response)
        self._write_began = math.inf

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises ResourceExhausted when the client has stopped reading."""
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            message = f"the client has read nothing for {self._stall_timeout_s:g} s"
            raise ResourceExhausted(message, reason="READER_STALLED") from None

    def _check(self) -> None:
        """A stalled write ends the call; else looks again when the one under way would have stalled."""
        now = time.monotonic()
        stalls_at = min(self._write_began, now) + self._stall_timeout_s
        if stalls_at <= now:
            self._timeout.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(stalls_at - now, self._check)
