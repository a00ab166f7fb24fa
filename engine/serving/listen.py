"""Where the engine listens: the address chooses gRPC, on a Unix socket or TCP, or shared memory."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Protocol

from pagoda.engine.v1 import engine_pb2

from ...channel.address import HAS_SHM, is_local, is_shm, is_unix
from ...channel.shm import ShmServer
from ...runtime.channel_trust import ChannelTrust, TrustError
from ...settings import EngineConfig
from ..core.errors import ConfigError
from .server import EngineServer

if TYPE_CHECKING:
    from .block_lender import Lent

log = logging.getLogger("pagoda.engine")


class Listener(Protocol):
    """address: where it listens, with the actual port once it does."""

    @property
    def address(self) -> str: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def check_exposure(config: EngineConfig) -> ChannelTrust:
    """Read what guards the channel.

    Raises ConfigError if a file is no good, and if other hosts can reach the address and nothing guards it.
    """
    if config.guards_of_channel and (is_shm(config.listen) or is_unix(config.listen)):
        options = ", ".join(config.guards_of_channel)
        raise ConfigError(f"{options}: only for HOST:PORT; the permissions of its file guard {config.listen}")
    if config.health_listen and is_shm(config.listen):
        raise ConfigError(f"--health-listen: only beside HOST:PORT and unix:PATH, not {config.listen}")
    trust = ChannelTrust(config, is_engine=True)
    try:
        trust.load()
    except TrustError as error:
        raise ConfigError(str(error)) from error
    if is_local(config.listen) or config.allow_insecure:
        return trust
    if not config.guards_of_channel:
        raise ConfigError(
            f"--listen {config.listen} is reachable from other hosts: give --channel-tls-cert, --channel-tls-key and "
            "--channel-tls-ca, or --channel-token-file, or --allow-insecure if the network itself is protected"
        )
    if trust.current.certificates is None:
        log.warning(
            "--listen %s: without --channel-tls-cert tokens, prompts and answers travel in the clear", config.listen
        )
    return trust


async def start_listening(
    server: EngineServer, config: EngineConfig, trust: ChannelTrust, lent: Lent | None = None
) -> Listener:
    """Listen on unix:PATH, shm:PATH, shm:@NAME or HOST:PORT. Raises ConfigError if that fails.

    lent  what other engines may fetch, over gRPC alone; None: nothing
    """
    listen = config.listen
    listener: Listener
    if is_shm(listen):
        if not HAS_SHM:
            raise ConfigError(f"--listen {listen}: shared memory needs Linux; unix:PATH works here")
        listener = ShmServer(listen, engine_pb2.RouterMessage.FromString, server.serve)
    else:
        # Only now: an engine that its router has started uses shared memory, and loads no gRPC.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else gRPC writes a line for each attempt of a wrong router
        from .grpc_server import GrpcServer

        listener = GrpcServer(listen, server, config.hang_timeout_s, trust, lent, config.health_listen)
    try:
        await listener.start()
    except OSError as error:
        raise ConfigError(f"--listen: cannot bind {listen}: {error.strerror or error}") from error
    return listener
