"""`python -m pagoda_server.engine`: an engine alone, for a router that attaches to it."""

from __future__ import annotations

import sys

from ..settings import EngineConfig
from ..settings.sources import plain_settings
from .serving.main import run


def main() -> None:
    if (config := plain_settings(sys.argv[1:], EngineConfig)) is not None:
        sys.exit(run(config))
    import typer  # only for what needs a parser: it takes as long as a sixth of torch

    from ..settings.command_line import command

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command(EngineConfig, run))
    app()


if __name__ == "__main__":
    main()
