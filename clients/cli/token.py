"""`pagoda token`: make a tenant's token, and its entry in the file of tenants."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from pagoda_server.cli.terminal import print_error

TOKEN_BYTES = 32  # too many values to try, so the file may hold a plain hash


def token(
    tenant: Annotated[str, typer.Argument(help="Tenant that the token is for.")],
    right: Annotated[
        list[str] | None,
        typer.Option(help="Also allow admin, observe or act_for_tenants. May be repeated.", show_default=False),
    ] = None,
    tenants_file: Annotated[
        Path | None, typer.Option(help="File to add the entry to. Without it, standard error shows the entry.")
    ] = None,
) -> None:
    """Make a token for a tenant, and print it to standard output: the server keeps only its hash."""
    from pagoda_server.router.errors import ConfigError
    from pagoda_server.router.tenants.caller import Right
    from pagoda_server.router.tenants.identity import check_tenant, read_tenants

    try:
        check_tenant("TENANT", tenant)
        rights = right or []
        if unknown := [name for name in rights if name not in set(Right)]:
            raise ValueError(f"--right {unknown[0]} is none of {', '.join(Right)}")
        if tenants_file is not None and tenants_file.exists():
            read_tenants(tenants_file)
    except (ValueError, ConfigError) as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    made = secrets.token_urlsafe(TOKEN_BYTES)
    entry = _entry(made, tenant, rights)
    if tenants_file is None:
        typer.echo(entry, err=True, nl=False)
    else:
        try:
            with tenants_file.open("a") as file:
                file.write(entry)
        except OSError as error:
            print_error(f"--tenants-file: cannot write {tenants_file}: {error.strerror}")
            raise typer.Exit(1) from None
    typer.echo(made)


def _entry(made: str, tenant: str, rights: list[str]) -> str:
    lines = [
        "",
        f"[[token]]  # made on {datetime.now(UTC):%Y-%m-%d}",
        f'sha256 = "{hashlib.sha256(made.encode()).hexdigest()}"',
        f'tenant = "{tenant}"',
    ]
    if rights:
        quoted = ", ".join(f'"{name}"' for name in rights)
        lines.append(f"rights = [{quoted}]")
    return "\n".join([*lines, ""])
