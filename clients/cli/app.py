"""The `pagoda` command: every command and its options."""

from __future__ import annotations

from typing import Annotated

import typer

from pagoda_server import installed_version
from pagoda_server.cli.certs import certs
from pagoda_server.cli.chat import chat
from pagoda_server.cli.config import config
from pagoda_server.cli.fleet import fleet
from pagoda_server.cli.generate import generate
from pagoda_server.cli.inspect import health, status
from pagoda_server.cli.kv_events import kv_events
from pagoda_server.cli.lora import lora
from pagoda_server.cli.models import list_present, models, pull, remove
from pagoda_server.cli.plan import plan
from pagoda_server.cli.run import run
from pagoda_server.cli.serve import serve
from pagoda_server.cli.token import token
from pagoda_server.cli.top import top
from pagoda_server.cli.trace import trace
from pagoda_server.cli.upgrade import upgrade
from pagoda_server.settings import ServeConfig
from pagoda_server.settings.command_line import command

app = typer.Typer(
    help="Pagoda: a gRPC streaming inference server for language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"pagoda {installed_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


app.command("serve")(command(ServeConfig, serve))
app.command()(generate)
app.command()(chat)
app.command()(run)
app.command()(pull)
app.command("list")(list_present)
app.command("rm")(remove)
app.command()(models)
app.command()(plan)
app.command()(status)
app.command()(top)
app.command()(trace)
app.command()(health)
app.command()(upgrade)
app.command()(kv_events)
app.command()(token)
app.command()(certs)
app.add_typer(config, name="config")
app.add_typer(fleet, name="fleet")
app.add_typer(lora, name="lora")
