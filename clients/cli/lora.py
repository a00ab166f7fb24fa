"""`pagoda lora`: load, unload and list the LoRA adapters of a running server."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from pagoda_server.cli.terminal import DEFAULT_ADDRESS, Address, Tls, TlsCa, Token, connect, errors_reported

lora = typer.Typer(help="Load, unload and list the LoRA adapters of a running server.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="How requests name the adapter.", show_default=False)]


@lora.command()
def add(
    name: Name,
    path: Annotated[str, typer.Argument(help="Folder of PEFT or GGUF file, in the server's --lora-dir.")],
    model: Annotated[str, typer.Option(help="Name of the model, where the server has several.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of an adapter of this name.")] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it on the device, even while no request uses it.")] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Have every engine load an adapter."""

    async def load() -> str:
        async with connect(address, token, tls, tls_ca) as client:
            adapter = await client.load_lora(name, path, model=model, replace=replace, pinned=pin)
            return f"{adapter.name}: rank {adapter.rank}, {adapter.num_bytes / 1e6:.1f} MB, {adapter.identity[:12]}"

    with errors_reported(address):
        typer.echo(asyncio.run(load()))


@lora.command()
def remove(
    name: Name, address: Address = DEFAULT_ADDRESS, token: Token = None, tls: Tls = False, tls_ca: TlsCa = None
) -> None:
    """Have every engine unload an adapter. Requests that run finish with it."""

    async def unload() -> None:
        async with connect(address, token, tls, tls_ca) as client:
            await client.unload_lora(name)

    with errors_reported(address):
        asyncio.run(unload())
    typer.echo(f"removed {name}")


@lora.command("list")
def list_loaded(
    address: Address = DEFAULT_ADDRESS, token: Token = None, tls: Tls = False, tls_ca: TlsCa = None
) -> None:
    """List the adapters that requests can name, and where they are."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    async def look() -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("Name", "Model", "Rank", "Size", "Identity", "Engines"):
            table.add_column(column, overflow="fold")
        async with connect(address, token, tls, tls_ca) as client:
            for each in await client.loras():
                size = f"{each.num_bytes / 1e6:.1f} MB{', pinned' if each.pinned else ''}"
                # Those who may not see engines learn whether one of them has it.
                where = each.fault or ", ".join(each.engines) or ("loaded" if each.ready else "not loaded")
                table.add_row(*map(escape, (each.name, each.model, str(each.rank), size, each.identity[:12], where)))
        return table

    with errors_reported(address):
        Console().print(asyncio.run(look()))
