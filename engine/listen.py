"""Where the engine listens: the address chooses the transport."""

from __future__ import annotations

from typing import Protocol

from channel.address import HAS_SHM, is_shm
from channel.shm_server import ShmServer
from engine.errors import ConfigError
from engine.grpc_server import GrpcServer
from engine.server import EngineServer
from protos import engine_pb2


class Listener(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def is_local(listen: str) -> bool:
    """A Unix socket, shared memory or a loopback address."""
    host = listen.rpartition(":")[0].strip("[]")
    return is_shm(listen) or listen.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")


async def start_listening(server: EngineServer, listen: str) -> Listener:
    """On unix:PATH, shm:PATH, shm:@NAME or HOST:PORT. Raises ConfigError if it cannot."""
    listener: Listener
    if is_shm(listen):
        if not HAS_SHM:
            raise ConfigError(f"--listen {listen}: shared memory needs Linux; unix:PATH works here")
        listener = ShmServer(listen, engine_pb2.RouterMessage.FromString, server.serve)
    else:
        listener = GrpcServer(listen, server.serve)
    try:
        await listener.start()
    except OSError as error:
        raise ConfigError(f"--listen: cannot bind {listen}: {error.strerror or error}") from error
    return listener
