"""What the commands share: options that reach a server, and how an error looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pagoda.aio import AsyncClient
    from pagoda.chunk import FinishReason

Address = Annotated[str, typer.Option(envvar="PAGODA_ADDRESS", help="HOST:PORT or unix:PATH of the server.")]
Token = Annotated[
    str | None, typer.Option(envvar="PAGODA_AUTH_TOKEN", show_envvar=True, help="Bearer token of the server.")
]
Tenant = Annotated[str | None, typer.Option(envvar="PAGODA_TENANT", help="Who the call is for.", show_default=False)]
Tls = Annotated[bool, typer.Option("--tls", help="Use TLS with the system's authorities.")]
TlsCa = Annotated[
    Path | None,
    typer.Option(help="Use TLS with the authorities in this PEM file.", exists=True, dir_okay=False, readable=True),
]
Timeout = Annotated[float | None, typer.Option(help="Deadline in seconds.", show_default=False)]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Tokens to generate at most.", show_default="the server's --default-max-tokens"),
]

DEFAULT_ADDRESS = "127.0.0.1:50051"
ENDINGS = {
    "length": "max_tokens or the end of the context reached",
    "cancelled": "cancelled by the server",
}
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C has ended


def connect(
    address: str,
    token: str | None,
    tls: bool,
    tls_ca: Path | None,
    timeout_s: float | None = None,
    tenant: str | None = None,
) -> AsyncClient:
    """A client for the running event loop.

    The commands use asyncio for the sake of Ctrl-C: it cancels a task there, while a KeyboardInterrupt that hits the
    blocking grpc as it starts a call leaves the call without the thread that would end it, and closing waits for ever.
    """
    from pagoda.aio import AsyncClient

    return AsyncClient(address, token=token, tenant=tenant, tls=tls_ca or tls, timeout_s=timeout_s)


def print_error(message: str) -> None:
    typer.secho(f"error: {' '.join(message.split())}", fg="red", err=True)


def print_ending(reason: FinishReason | None) -> None:
    """One line to standard error where an answer is not at its own end."""
    if reason != "stop":
        typer.secho(f"[stopped: {ENDINGS.get(str(reason), 'it does not say why')}]", dim=True, err=True)


@contextmanager
def errors_reported(address: str = "") -> Iterator[None]:
    """An expected error becomes one red line and exit code 1; Ctrl-C, exit code 130."""
    from pagoda.errors import PagodaError, Unavailable
    from pagoda_server.checkpoints import CheckpointError

    try:
        yield
    except (PagodaError, CheckpointError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise  # the reader has seen enough: typer ends quietly
        print_error(f"{address} is unavailable: {error}" if isinstance(error, Unavailable) else str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
