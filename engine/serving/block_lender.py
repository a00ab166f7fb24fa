"""The service Blocks: other engines fetch what the prefix cache of this one holds."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import grpc

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc

AT_ONCE = 4  # calls; each has the parts in memory that it has asked for, and the one that it sends
PART_BYTES = 4 << 20  # of blocks that are copied out of the cache at a time
# Parts that a call asks the loop for at once. With one, the next would be asked for when the loop has just planned a
# step without it, and each would take two steps.
PARTS_ASKED = 2
ADDRESS_BYTES = 32
MOST_S = 5.0  # of a call: one that takes longer holds a place that others want

Lend: TypeAlias = Callable[[list[bytes]], Coroutine[Any, Any, list[bytes]]]
Context: TypeAlias = grpc.aio.ServicerContext[engine_pb2.FetchRequest, engine_pb2.FetchedBlock]


@dataclass(frozen=True, slots=True)
class Lent:
    """What an engine lends.

    layout           see EngineMessage.block_layout
    bytes_per_block  of a block's content
    most             addresses of a call
    """

    layout: bytes
    bytes_per_block: int
    most: int


class BlockLender(engine_pb2_grpc.BlocksServicer):
    """
    lend        returns the contents of the blocks at these addresses, up to the first one that is not cached
    is_trusted  whether a call has what the channel asks for
    """

    def __init__(self, lend: Lend, lent: Lent, is_trusted: Callable[[Context], bool]) -> None:
        self._lend = lend
        self._lent = lent
        self._is_trusted = is_trusted
        self._at_a_time = max(1, PART_BYTES // lent.bytes_per_block)
        self._num_calls = 0

    async def Fetch(self, request: engine_pb2.FetchRequest, context: Context) -> None:
        if not self._is_trusted(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid token of the channel is required")
        if request.layout != self._lent.layout:
            why = "layout: this engine's blocks hold something else: other weights, precision, size or version"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        if not 1 <= len(request.addresses) <= self._lent.most:
            why = f"addresses: are {len(request.addresses)}, must be from 1 to {self._lent.most}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        if any(len(address) != ADDRESS_BYTES for address in request.addresses):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"addresses: must have {ADDRESS_BYTES} bytes each")
        if self._num_calls >= AT_ONCE:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{AT_ONCE} engines fetch blocks already")
        self._num_calls += 1
        asked: deque[asyncio.Future[list[bytes]]] = deque()
        try:
            await self._send(list(request.addresses), asked, context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"the blocks were not taken within {MOST_S:g} s")
        finally:
            self._leave(asked)

    async def _send(self, addresses: list[bytes], asked: deque[asyncio.Future[list[bytes]]], context: Context) -> None:
        """Send blocks up to the first one that is not cached.

        asked  gets the parts that the loop has been asked for and that have not been taken

        Raises TimeoutError after MOST_S, but not before the block that is being sent: gRPC sends no status until then.
        """
        until = asyncio.get_running_loop().time() + MOST_S
        parts = [addresses[start : start + self._at_a_time] for start in range(0, len(addresses), self._at_a_time)]
        calls = (asyncio.ensure_future(self._lend(part)) for part in parts)
        asked.extend(islice(calls, PARTS_ASKED))
        for part in parts:
            async with asyncio.timeout_at(until):
                contents = await asyncio.shield(asked[0])  # a call that ends meanwhile waits for the loop: `_leave`
            asked.popleft()
            asked.extend(islice(calls, 1))
            for content in contents:
                if asyncio.get_running_loop().time() > until:
                    raise TimeoutError
                try:
                    await context.write(engine_pb2.FetchedBlock(content=content, crc32=zlib.crc32(content)))
                except grpc.aio.BaseError:
                    raise asyncio.CancelledError from None  # the call is over: gRPC logs any other exception
            if len(contents) < len(part):
                return

    def _leave(self, asked: Sequence[asyncio.Future[list[bytes]]]) -> None:
        """Give a call's place back, once the loop has answered: calls that are cancelled must not fill its queue."""
        if left := [each for each in asked if not each.done()]:
            left[0].add_done_callback(lambda _: self._leave(left))
        else:
            self._num_calls -= 1
