"""`python -m pagoda_server.engine`: an engine alone, for a router that attaches to it."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from ..settings import EngineConfig
from ..settings.sources import plain_settings
from .runners.import_torch import preload_torch


def run(config: EngineConfig) -> int:
    """Serve a model's tokens to routers. Returns the process's exit code."""
    if _has_weights(config.model):
        preload_torch()
    from .serving.main import run as serve  # only now: meanwhile the libraries are linked

    return serve(config)


def _has_weights(model: str) -> bool:
    """Whether this is the folder of a model other than the synthetic one. A router gives its engine a folder."""
    try:
        return b'"synthetic"' not in Path(model, "config.json").read_bytes()
    except OSError:
        return False


def main() -> None:
    gc.disable()  # what is loaded stays: collections only walk it
    if (config := plain_settings(sys.argv[1:], EngineConfig)) is not None:
        sys.exit(run(config))
    import typer  # only for what needs a parser: it takes as long as a sixth of torch

    from ..settings.command_line import command

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command(EngineConfig, run))
    app()


if __name__ == "__main__":
    main()
