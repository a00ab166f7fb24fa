"""`pagoda models` and `pagoda status`: what can be served, and how a running server is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda_server.cli.terminal import DEFAULT_ADDRESS, Address, Tls, TlsCa, Token, connect, errors_reported

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from pagoda.v1 import control_pb2

TENANTS_SHOWN = 8


def models() -> None:
    """List what `pagoda serve --model` takes by name."""
    from rich.console import Console
    from rich.table import Table

    from pagoda_server.checkpoints import DEFAULT_MODEL, list_models

    with errors_reported():
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("Name", "Family", "Size"):
            table.add_column(heading, no_wrap=True)
        table.add_column("Where", overflow="fold")
        for model in list_models():
            name = f"{model.name} (default)" if model.name == DEFAULT_MODEL else model.name
            size = "" if model.size_bytes is None else f"{model.size_bytes / 1e6:.1f} MB"
            table.add_row(name, model.family, size, str(model.folder or "imported on first use"))
        console = Console()
        console.print(table)
        console.print("[dim]also: a folder, a .gguf file, or a name on the Hugging Face Hub[/]", highlight=False)


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Go on showing the load until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks, with --watch.")] = 1.0,
    address: Address = DEFAULT_ADDRESS,
    token: Token = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Show a running server: what it serves, its sizes, and its load."""
    from rich.console import Console
    from rich.live import Live

    async def look() -> None:
        async with connect(address, token, tls, tls_ca, timeout_s=None if watch else 10.0) as client:
            console = Console()
            console.print(info_table(await client.server_info()))
            console.print()
            if not watch:
                console.print(load_tables(await client.load()))
                return
            with Live(console=console, auto_refresh=False) as live:
                async for load in client.watch_load(interval):
                    live.update(load_tables(load), refresh=True)

    with errors_reported(address):
        asyncio.run(look())


def info_table(info: control_pb2.ServerInfo) -> Table:
    from pagoda.v1 import control_pb2

    rows = {
        "model": info.model,
        "version": info.version,
        "state": control_pb2.ServerState.Name(info.state).removeprefix("SERVER_STATE_").lower(),
        "up": f"{info.uptime_s:.0f} s",
    }
    for status in info.engines:
        at = f" {status.engine}" if len(info.engines) > 1 else ""
        state = control_pb2.EngineState.Name(status.state).removeprefix("ENGINE_STATE_").lower()
        rows[f"engine{at}"] = f"{state}, restarted {status.restarts} times" if status.restarts else state
        if status.HasField("info"):
            rows |= {f"{name}{at}": value for name, value in _engine_rows(status.info).items()}
    return _table(rows)


def _engine_rows(engine: control_pb2.EngineInfo) -> dict[str, str]:
    cache = engine.kv_cache
    return {
        "runs on": f"{engine.device}, {engine.dtype}, {engine.kernel_backend} kernels",
        "architecture": f"{engine.architecture}, {engine.weight_bytes / 1e6:.0f} MB of weights",
        "context": f"{engine.max_model_len} tokens",
        "batch": f"{engine.max_num_seqs} sequences, {engine.token_budget} tokens a step",
        "KV cache": f"{cache.total_bytes / 1e9:.2f} GB: {cache.num_blocks} blocks of {cache.block_size} tokens, "
        f"{cache.token_capacity} tokens at {cache.bytes_per_token} bytes",
    }


def load_tables(load: control_pb2.Load) -> Group:
    """The whole server's, then each engine's."""
    from rich.console import Group

    rows = {"requests": f"{load.requests} admitted, {load.reserved_tokens} tokens reserved"}
    if any(tenant.name for tenant in load.tenants):
        rows["tenants"] = _tenants(load)
    tables: list[RenderableType] = [_table(rows)]
    for engine in load.engines:
        if len(load.engines) > 1:
            tables.append(f"\n[bold]engine {engine.engine}[/]")
        tables.append(_table(_load_rows(engine)))
    return Group(*tables)


def _load_rows(load: control_pb2.EngineLoad) -> dict[str, str]:
    rows = {
        "sequences": f"{load.running} running, {load.waiting} waiting",
        "KV blocks": f"{load.blocks_referenced} in use, {load.blocks_evictable} cached, {load.blocks_free} free "
        f"of {load.blocks_total}; {100 * load.kv_waste:.1f} % of the slots in use are for no token",
        "last step": f"{load.step_sequences} sequences, {load.step_tokens} tokens, {1e3 * load.step_s:.1f} ms",
        "since start": f"{load.steps} steps, {load.prompt_tokens} prompt tokens "
        f"({100 * load.prefix_hit_rate:.0f} % cached), {load.output_tokens} output tokens, "
        f"{load.preemptions} preemptions",
        "for nothing": f"{load.recomputed_tokens} tokens computed again, {load.dropped_tokens} after their end",
    }
    if load.host_blocks_total:
        rows["host memory"] = (
            f"{load.host_blocks_used} of {load.host_blocks_total} blocks in use, "
            f"{load.saved_tokens} tokens copied there, {load.loaded_tokens} back"
        )
    return rows


def _tenants(load: control_pb2.Load) -> str:
    """A line for each of the most served; calls that name no tenant are in parentheses."""
    lines = [
        f"{tenant.name or '(none)'}: {100 * tenant.share:.0f} % of the last 10 s, "
        f"{tenant.running} running, {tenant.waiting} waiting"
        for tenant in load.tenants[:TENANTS_SHOWN]
    ]
    if more := load.num_tenants - len(lines):
        lines.append(f"and {more} more")
    return "\n".join(lines)


def _table(rows: dict[str, str]) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    return table
