"""`pagoda trace`: where the time of a running server's last seconds went."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda_server.cli.terminal import (
    DEFAULT_ADDRESS,
    Address,
    Tls,
    TlsCa,
    Token,
    connect,
    errors_reported,
    print_error,
)

if TYPE_CHECKING:
    from pagoda.v1 import trace_pb2

MOST_S = 60.0  # what an engine keeps


def trace(
    seconds: Annotated[float, typer.Option(help="Seconds to look back.", min=0.001, max=MOST_S)] = 10.0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Trace JSON, for ui.perfetto.dev or chrome://tracing.")
    ] = Path("trace.json"),
    picture: Annotated[Path | None, typer.Option(help="Also draw it, as .png, .svg or .pdf.")] = None,
    address: Address = DEFAULT_ADDRESS,
    token: Token = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Write what a server's last steps did: which sequences ran, with how many tokens, and why others did not."""
    from pagoda_server.cli.trace_timeline import timelines, trace_document

    if picture is not None:
        _check_drawable(picture)
    with errors_reported(address):
        parts = asyncio.run(_take(seconds, address, token, tls, tls_ca))
        engines = timelines(parts)
        output.write_text(json.dumps(trace_document(engines)))
        num_steps = sum(len(timeline.steps) for timeline in engines)
        num_sequences = sum(len(timeline.tracks) for timeline in engines)
        typer.echo(f"{output}: {num_steps} steps, {num_sequences} sequences")
        if picture is not None:
            if not num_steps:
                print_error(f"no steps in the last {seconds:g} s, so there is nothing to draw: send requests meanwhile")
                raise typer.Exit(1)
            from pagoda_server.cli.trace_picture import draw

            for timeline in engines:
                path = picture if len(engines) == 1 else picture.with_stem(f"{picture.stem}-{timeline.engine}")
                draw(timeline, f"{address}, {len(timeline.steps):,} steps in {timeline.end_s:.1f} s", path)
                typer.echo(str(path))


async def _take(
    seconds: float, address: str, token: str | None, tls: bool, tls_ca: Path | None
) -> list[trace_pb2.StepTracePart]:
    async with connect(address, token, tls, tls_ca, timeout_s=30.0) as client:
        return [part async for part in client.step_trace(seconds)]


def _check_drawable(picture: Path) -> None:
    """Exit unless the picture can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print_error("--picture needs matplotlib: pip install 'pagoda-server[bench]'")
        raise typer.Exit(1) from None
    if picture.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"{picture.suffix or 'no suffix'} is none of .png, .svg, .pdf", param_hint="--picture")
