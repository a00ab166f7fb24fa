"""`pagoda serve`."""

from __future__ import annotations

from pagoda_server.settings import ServeConfig


def serve(config: ServeConfig) -> int:
    """Serve a model: start a router, and an engine that it supervises unless --engine gives the address of one."""
    from pagoda_server.cli.progress import shown_progress
    from pagoda_server.router.process import main

    with shown_progress() as progress:
        return main.serve(config, progress)
