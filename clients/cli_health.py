"""`pagoda health`: whether a router or an engine can serve, for health checks of containers."""

from __future__ import annotations

from typing import Annotated

import typer

from clients.terminal import DEFAULT_ADDRESS, Address, Tls, TlsCa

TIMEOUT_S = 3.0


def health(
    service: Annotated[str, typer.Option(help="The service asked about; empty: the whole server.")] = "",
    address: Address = DEFAULT_ADDRESS,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Ask a router or an engine whether it is serving: exit code 0 if it is, 1 if not."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from clients.connection import credentials

    secret = credentials(tls_ca or tls)
    with grpc.secure_channel(address, secret) if secret else grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S).status
            answer = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
        except grpc.RpcError as error:
            answer = error.code().name
    typer.echo(answer)
    raise typer.Exit(0 if answer == "SERVING" else 1)
