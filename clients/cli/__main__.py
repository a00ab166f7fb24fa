"""The `pagoda` command."""

from __future__ import annotations

import typer

from pagoda_server.cli.chat import chat
from pagoda_server.cli.generate import generate
from pagoda_server.cli.health import health
from pagoda_server.cli.inspect import models, status
from pagoda_server.cli.trace import trace
from pagoda_server.settings import ServeConfig
from pagoda_server.settings.command_line import command

app = typer.Typer(
    help="Pagoda: a gRPC streaming inference server for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _serve(config: ServeConfig) -> int:
    """Serve a model: a router, and the engine that it spawns and supervises unless --engine says where one runs."""
    from pagoda_server.cli.progress_bars import shown_progress
    from pagoda_server.router.process.main import serve

    with shown_progress() as progress:
        return serve(config, progress)


app.command("serve")(command(ServeConfig, _serve))
app.command()(generate)
app.command()(chat)
app.command()(models)
app.command()(status)
app.command()(trace)
app.command()(health)


def main() -> None:
    app(prog_name="pagoda")


if __name__ == "__main__":
    main()
