"""`pagoda certs`: a private authority, and the certificates with which it signs routers and engines of one fleet."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pagoda_server.cli.terminal import print_error
from pagoda_server.runtime.authority import AUTHORITY, AUTHORITY_DAYS, ROUTER, Authority, CertsError

ENGINE_PORT = 50052


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the authority and its certificates.")],
    engines: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST]...",
            help="Host of an engine: a name or an IP address. More of them, after commas, mean the same engine.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="Days that the certificates are valid.", min=1, max=AUTHORITY_DAYS)] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace certificates and keys, of all engines if none is named.")
    ] = False,
) -> None:
    """Make certificates for the channel between routers and engines, and an authority that signs them."""
    try:
        import cryptography  # noqa: F401 (only to see whether it is there)
    except ModuleNotFoundError:
        print_error("`pagoda certs` needs more packages: pip install 'pagoda-server[certs]'")
        raise typer.Exit(1) from None
    try:
        made = Authority(folder, days).renew(engines or []) if renew else Authority(folder, days).add(engines or [])
    except CertsError as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    except OSError as error:
        print_error(f"cannot write {error.filename or folder}: {error.strerror}")
        raise typer.Exit(1) from None
    _print_lines(folder, made)


def _print_lines(folder: Path, engines: Sequence[str]) -> None:
    """Print how to start what the certificates are for."""

    def options(name: str) -> str:
        files = {"cert": f"{name}.pem", "key": f"{name}.key", "ca": f"{AUTHORITY}.pem"}
        return " ".join(f"--channel-tls-{option} {shlex.quote(str(folder / file))}" for option, file in files.items())

    addresses = [f"[{name}]:{ENGINE_PORT}" if ":" in name else f"{name}:{ENGINE_PORT}" for name in engines]
    typer.echo(f"Keep {folder / AUTHORITY}.key to yourself: routers and engines do not need it.")
    for name, address in zip(engines, addresses, strict=True):
        typer.echo(f"\nThe engine on {name}:\n  python -m pagoda_server.engine --listen {address} {options(name)}")
    if engines:
        typer.echo(f"\nA router:\n  pagoda serve --engine {','.join(addresses)} {options(ROUTER)}")
