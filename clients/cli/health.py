"""`pagoda health`: whether a router or an engine can serve, for health checks of containers."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer

from pagoda_server.channel.address import is_shm
from pagoda_server.cli.terminal import DEFAULT_ADDRESS, Address, Tls, TlsCa, errors_reported

TIMEOUT_S = 3.0


def health(
    service: Annotated[str, typer.Option(help="The service asked about; empty: the whole server.")] = "",
    address: Address = DEFAULT_ADDRESS,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Ask a router or an engine whether it is serving: exit code 0 if it is, 1 if not."""
    with errors_reported(address):
        if is_shm(address):
            answer = "SERVING" if asyncio.run(_says_hello(address)) else "UNAVAILABLE"
        else:
            answer = _grpc_health(service, address, tls_ca or tls)
    typer.echo(answer)
    raise typer.Exit(0 if answer == "SERVING" else 1)


async def _says_hello(address: str) -> bool:
    """An engine on shared memory has no health service: it is well if it greets as it greets a router."""
    from pagoda.engine.v1 import engine_pb2
    from pagoda_server.channel import shm

    try:
        async with asyncio.timeout(TIMEOUT_S):
            link: shm.ShmLink[engine_pb2.EngineMessage, engine_pb2.RouterMessage]
            link = await shm.connect(address, engine_pb2.EngineMessage.FromString)
            with contextlib.closing(link):
                return await link.read() is not None
    except OSError:
        return False


def _grpc_health(service: str, address: str, tls: bool | Path) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pagoda.connection import credentials
    from pagoda.fields import assign

    request = health_pb2.HealthCheckRequest()
    assign(request, "service", service)
    secret = credentials(tls)
    with grpc.secure_channel(address, secret) if secret else grpc.insecure_channel(address) as channel:
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S).status
            answer: str = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
            return answer
        except grpc.RpcError as error:
            code: str = error.code().name
            return code
