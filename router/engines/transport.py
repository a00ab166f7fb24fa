"""How a router reaches an engine: the address chooses the transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeAlias

import grpc

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc

from ...channel import shm
from ...channel.address import HAS_SHM, is_shm, is_unix
from ...channel.link import MAX_MESSAGE_BYTES, Link
from ...channel.listening import channel_keepalive
from ...runtime.channel_trust import Certificates, ChannelTrust, Trust
from ..errors import ConfigError
from .handshake import NotTrusted, shake_hands, uses_tls

EngineLink: TypeAlias = Link[engine_pb2.EngineMessage, engine_pb2.RouterMessage]

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # gRPC's own delays between attempts grow to two minutes; EngineChannel has shorter ones.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # how long an attempt may take: the host of an engine may be busy
    ("grpc.max_reconnect_backoff_ms", 200),
]


class Transport(Protocol):
    """Connects to one engine's address, any number of times."""

    async def connect(self) -> EngineLink:
        """Connect to the engine.

        If none answers, this or the link's first read raises OSError; if one does that is not trusted or that does not
        trust this router, NotTrusted.
        """

    @property
    def is_connected(self) -> bool:
        """Whether something has taken the connection that was made last, though it may not have answered."""
        ...

    async def close(self) -> None: ...


def transport_to(address: str, trust: ChannelTrust | None = None) -> Transport:
    """The transport for an address. Raises ConfigError if this system lacks it.

    trust  what guards engines at HOST:PORT; None: nothing
    """
    if not is_shm(address):
        return GrpcTransport(address, trust)
    if not HAS_SHM:
        raise ConfigError(f"the engine address {address}: shared memory needs Linux")
    return ShmTransport(address)


class ShmTransport:
    def __init__(self, address: str) -> None:
        self._address = address

    async def connect(self) -> EngineLink:
        return await shm.connect(self._address, engine_pb2.EngineMessage.FromString)

    @property
    def is_connected(self) -> bool:
        return True  # connect() waits for that

    async def close(self) -> None:
        """Do nothing: no state outlives a link."""


class GrpcTransport:
    def __init__(self, address: str, trust: ChannelTrust | None = None) -> None:
        self._address = address
        self._trust = None if is_unix(address) else trust
        self._channel: grpc.aio.Channel | None = None
        self._certificates: Certificates | None = None  # of the channel

    async def connect(self) -> EngineLink:
        trust = self._trust.current if self._trust else Trust()
        name = self._trust.engine_name if self._trust else None
        if trust.certificates:
            await shake_hands(self._address, name, trust.certificates)
        if self._channel is None or self._certificates != trust.certificates:
            await self.close()
            self._channel, self._certificates = _channel(self._address, trust.certificates, name), trust.certificates
        call = engine_pb2_grpc.EngineStub(self._channel).Connect(metadata=trust.metadata)
        return GrpcLink(call, partial(self._refusal, trust))

    @property
    def is_connected(self) -> bool:
        return self._channel is not None and self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def _refusal(self, trust: Trust, error: grpc.aio.AioRpcError) -> NotTrusted | None:
        """Why the engine has refused this router; None: for another reason."""
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            if trust.tokens:
                return NotTrusted("it refuses this router's token: both must have it in their --channel-token-file")
            return NotTrusted("it asks for a token: give --channel-token-file")
        is_plain = trust.certificates is None and not is_unix(self._address)
        if is_plain and error.code() is grpc.StatusCode.UNAVAILABLE and await uses_tls(self._address):
            return NotTrusted("it uses TLS: give --channel-tls-cert, --channel-tls-key and --channel-tls-ca")
        return None

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


def _channel(address: str, certificates: Certificates | None, name: str | None) -> grpc.aio.Channel:
    options = [*CHANNEL_OPTIONS, *channel_keepalive(address)]
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(certificates.authorities, certificates.key, certificates.certificate)
    named = [("grpc.ssl_target_name_override", name)] if name else []
    return grpc.aio.secure_channel(address, credentials, options=[*options, *named])


class GrpcLink:
    """The router's end of one call; a Link.

    refusal  finds out whether an error before the first message means that one end does not trust the other
    """

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[engine_pb2.RouterMessage, engine_pb2.EngineMessage],
        refusal: Callable[[grpc.aio.AioRpcError], Awaitable[NotTrusted | None]],
    ) -> None:
        self._call = call
        self._refusal = refusal
        self._messages = aiter(call)
        self._has_begun = False
        self._is_closed = False

    async def read(self) -> engine_pb2.EngineMessage | None:
        try:
            message = await anext(self._messages, None)
            self._has_begun = True
            return message
        except grpc.aio.AioRpcError as error:
            if (task := asyncio.current_task()) and task.cancelling():  # it met the end of the call: gRPC forgets it
                raise asyncio.CancelledError from error
            if not self._has_begun and (refusal := await self._refusal(error)):
                raise refusal from error
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
