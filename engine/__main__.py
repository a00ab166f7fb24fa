"""`python -m pagoda_server.engine`: an engine alone, for a router that attaches to it."""

from __future__ import annotations

import typer

from ..settings import EngineConfig
from ..settings.command_line import command
from .serving.main import run

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command(EngineConfig, run))
    app()
