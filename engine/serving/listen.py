"""Where the engine listens: the address chooses gRPC, on a Unix socket or TCP, or shared memory."""

from __future__ import annotations

from typing import Protocol

from pagoda.engine.v1 import engine_pb2

from ...channel.address import HAS_SHM, is_local, is_shm
from ...channel.shm import ShmServer
from ...settings import EngineConfig
from ..core.errors import ConfigError
from .server import EngineServer


class Listener(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def check_exposure(config: EngineConfig) -> None:
    """Raise ConfigError for an address that other hosts can reach, unless that is allowed."""
    if not (is_local(config.listen) or config.allow_insecure):
        raise ConfigError(
            f"--listen {config.listen} is reachable from other hosts; if the network is guarded, add --allow-insecure"
        )


async def start_listening(server: EngineServer, config: EngineConfig) -> Listener:
    """Listen on unix:PATH, shm:PATH, shm:@NAME or HOST:PORT. Raises ConfigError if that fails."""
    listen = config.listen
    listener: Listener
    if is_shm(listen):
        if not HAS_SHM:
            raise ConfigError(f"--listen {listen}: shared memory needs Linux; unix:PATH works here")
        listener = ShmServer(listen, engine_pb2.RouterMessage.FromString, server.serve)
    else:
        # Only now: an engine that its router has started uses shared memory, and loads no gRPC.
        from .grpc_server import GrpcServer

        listener = GrpcServer(listen, server, config.hang_timeout_s)
    try:
        await listener.start()
    except OSError as error:
        raise ConfigError(f"--listen: cannot bind {listen}: {error.strerror or error}") from error
    return listener
