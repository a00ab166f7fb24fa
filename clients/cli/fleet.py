"""`pagoda fleet`: keeps engines on Ray, and commands a fleet that runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pagoda_server.cli.terminal import print_error
from pagoda_server.settings.command_line import command
from pagoda_server.settings.fleet import FleetConfig

EXIT_REFUSED, EXIT_NO_DRIVER = 1, 2
Folder = Annotated[Path, typer.Option(envvar="PAGODA_FOLDER", help="Folder of the fleet, as its driver was given it.")]
FOLDER = Path("pagoda-fleet")
OF_ROUTERS = ("name", "state", "node", "address", "http", "version")
COLUMNS = ("name", "state", "node", "address", "sequences", "uncomputed_tokens", "version")


def _run(config: FleetConfig) -> int:
    """Keep a fleet of engines on Ray, on this host or on a cluster: as many as their load asks for."""
    from pagoda_server.fleet.main import run

    return run(config)


fleet = typer.Typer(invoke_without_command=True, callback=command(FleetConfig, _run))


@fleet.command()
def status(
    folder: Folder = FOLDER, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show the engines and routers of a fleet: where they are and what they do."""
    found = _ask(folder, "status")
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(f"{found['wanted']} engines are wanted, of {found['bounds']}")
    _show(COLUMNS, found["engines"])
    if found.get("routers"):
        typer.echo()
        _show(OF_ROUTERS, found["routers"])


def _show(columns: Sequence[str], found: Sequence[Mapping[str, Any]]) -> None:
    rows = [list(columns), *([str(each[name]) for name in columns] for each in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, each in zip(rows, [{}, *found], strict=True):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if each.get("last_line") and each["state"] in ("ended", "starting"):
            typer.echo(f"    {each['last_line']}")


@fleet.command()
def scale(
    engines: Annotated[str, typer.Argument(help="A number of engines, or MIN..MAX.")], folder: Folder = FOLDER
) -> None:
    """Change how many engines a fleet has, until its driver is started again."""
    found = _ask(folder, "scale", engines)
    typer.echo(f"{found['wanted']} engines are wanted, of {found['bounds']}")


@fleet.command()
def drain(
    name: Annotated[str, typer.Argument(help="Its name, as `pagoda fleet status` shows it.")],
    folder: Folder = FOLDER,
) -> None:
    """Let an engine or a router finish what it runs and end, once another one serves in its place."""
    _ask(folder, "drain", name)
    typer.echo(f"{name} has ended")


@fleet.command()
def upgrade(folder: Folder = FOLDER) -> None:
    """Replace every engine and router, one after the other, by the version that is installed now on their hosts."""
    typer.echo(f"replaced {_ask(folder, 'upgrade')['replaced']} engines and routers")


def _ask(folder: Path, command: str, argument: str = "") -> dict[str, Any]:
    from pagoda_server.fleet.control import NoDriverError, ask
    from pagoda_server.fleet.folder import CONTROL

    try:
        return ask(folder / CONTROL, command, argument)
    except NoDriverError as error:
        print_error(str(error))
        raise typer.Exit(EXIT_NO_DRIVER) from None
    except ValueError as error:
        print_error(str(error))
        raise typer.Exit(EXIT_REFUSED) from None
