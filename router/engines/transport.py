"""How a router reaches an engine: the address chooses the transport."""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeAlias

import grpc

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc

from ...channel import shm
from ...channel.address import HAS_SHM, is_shm
from ...channel.link import MAX_MESSAGE_BYTES, Link
from ...channel.listening import channel_keepalive
from ..errors import ConfigError

EngineLink: TypeAlias = Link[engine_pb2.EngineMessage, engine_pb2.RouterMessage]

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # gRPC's own delays between attempts grow to two minutes; EngineChannel has shorter ones.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
]


class Transport(Protocol):
    """Connects to one engine's address, any number of times."""

    async def connect(self) -> EngineLink:
        """Connect to the engine. If none answers, this or the link's first read raises OSError."""

    async def close(self) -> None: ...


def transport_to(address: str) -> Transport:
    """The transport for an address. Raises ConfigError if this system lacks it."""
    if not is_shm(address):
        return GrpcTransport(address)
    if not HAS_SHM:
        raise ConfigError(f"the engine address {address}: shared memory needs Linux")
    return ShmTransport(address)


class ShmTransport:
    def __init__(self, address: str) -> None:
        self._address = address

    async def connect(self) -> EngineLink:
        return await shm.connect(self._address, engine_pb2.EngineMessage.FromString)

    async def close(self) -> None:
        """Do nothing: no state outlives a link."""


class GrpcTransport:
    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *channel_keepalive(address)])
        self._stub = engine_pb2_grpc.EngineStub(self._channel)

    async def connect(self) -> EngineLink:
        return GrpcLink(self._stub.Connect())

    async def close(self) -> None:
        await self._channel.close()


class GrpcLink:
    """The router's end of one call; a Link."""

    def __init__(self, call: grpc.aio.StreamStreamCall[engine_pb2.RouterMessage, engine_pb2.EngineMessage]) -> None:
        self._call = call
        self._messages = aiter(call)
        self._is_closed = False

    async def read(self) -> engine_pb2.EngineMessage | None:
        try:
            return await anext(self._messages, None)
        except grpc.aio.AioRpcError as error:
            if (task := asyncio.current_task()) and task.cancelling():  # it met the end of the call: gRPC forgets it
                raise asyncio.CancelledError from error
            is_absent = error.code() is grpc.StatusCode.UNAVAILABLE
            raise (ConnectionRefusedError if is_absent else ConnectionError)(error.details()) from error
        except asyncio.CancelledError:
            if self._is_closed:  # close() cancels the call, which cancels a pending read
                return None
            raise

    async def write(self, message: engine_pb2.RouterMessage) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise ConnectionError("the call is over") from error

    @property
    def is_free(self) -> bool:
        return False

    def try_write(self, message: engine_pb2.RouterMessage) -> bool:
        return False

    def close(self) -> None:
        self._is_closed = True
        self._call.cancel()
