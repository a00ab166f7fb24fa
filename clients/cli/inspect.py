"""`pagoda status` and `pagoda health`: the state of a running server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagoda_server.channel.address import is_shm
from pagoda_server.cli.terminal import DEFAULT_ADDRESS, Address, Tls, TlsCa, Token, connect, errors_reported

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from pagoda.aio import AsyncClient
    from pagoda.v1 import control_pb2

TENANTS_SHOWN = 8


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing the load until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between updates, with --watch.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Show a running server: what it serves, its sizes, and its load. The exit code is 0 if it serves, 1 if not."""
    from rich.console import Console
    from rich.live import Live

    from pagoda.v1 import control_pb2

    if watch and as_json:
        raise typer.BadParameter("shows a single moment, so it does not go with --watch", param_hint="--json")

    async def look() -> bool:
        async with connect(address, token, tls, tls_ca, timeout_s=None if watch else 10.0) as client:
            console = Console()
            info = await client.server_info()
            if as_json:
                found = {"address": address, "server": plain(info), "models": await _models(client)}
                typer.echo(json.dumps(found | {"load": plain(await client.load())}, indent=2))
            else:
                console.print(info_table(info))
                console.print()
                if not watch:
                    console.print(load_tables(await client.load()))
            if watch:
                with Live(console=console, auto_refresh=False) as live:
                    async for load in client.watch_load(interval):
                        live.update(load_tables(load), refresh=True)
            return info.state == control_pb2.SERVER_STATE_SERVING

    with errors_reported(address):
        is_serving = asyncio.run(look())
    raise typer.Exit(0 if is_serving else 1)


async def _models(client: AsyncClient) -> list[Any]:
    """What requests may name; nothing while no engine has been ready."""
    from pagoda.errors import Unavailable

    try:
        return [plain(model) for model in await client.models()]
    except Unavailable:
        return []


def plain(value: Any) -> Any:
    """A message as JSON takes it: fields by their names in the proto, a field that is not set left out.

    64-bit integers stay numbers, which protobuf's own JSON writes as strings, and enums are words such as "ready".
    """
    from google.protobuf.message import Message

    if isinstance(value, Message):
        fields = value.DESCRIPTOR.fields
        return {
            field.name: _enum_words(field.enum_type, found) if field.enum_type else plain(found)
            for field in fields
            if not field.has_presence or value.HasField(field.name)
            for found in [getattr(value, field.name)]
        }
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return value if isinstance(value, str | int | float) else [plain(each) for each in value]


def _enum_words(enum: Any, value: Any) -> Any:
    """The value, or each of several, as a word.

    enum  its descriptor, which has a class for each implementation of protobuf
    """
    if not isinstance(value, int):
        return [_enum_words(enum, each) for each in value]
    if value not in enum.values_by_number:  # of a newer server
        return value
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return enum.values_by_number[value].name.removeprefix(prefix).lower()


def info_table(info: control_pb2.ServerInfo) -> Table:
    from pagoda.v1 import control_pb2

    rows = {
        "model": info.model,
        "version": info.version,
        "state": control_pb2.ServerState.Name(info.state).removeprefix("SERVER_STATE_").lower(),
        "up": f"{info.uptime_s:.0f} s",
    }
    for status in info.engines:
        at = f" {status.name or status.engine}" if len(info.engines) > 1 else ""
        state = control_pb2.EngineState.Name(status.state).removeprefix("ENGINE_STATE_").lower()
        rows[f"engine{at}"] = f"{state}, restarted {status.restarts} times" if status.restarts else state
        if status.model not in ("", info.model):
            rows[f"model{at}"] = status.model
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
    """The server's load, then each engine's."""
    from rich.console import Group
    from rich.markup import escape

    rows = {"requests": f"{load.requests} admitted"}
    if load.reserved_tokens:
        rows["requests"] += f", {load.reserved_tokens} tokens reserved"
    if any(tenant.name for tenant in load.tenants):
        rows["tenants"] = _tenants(load)
    tables: list[RenderableType] = [_table(rows)]
    for engine in load.engines:
        if len(load.engines) > 1:
            tables.append(f"\n[bold]engine {escape(engine.name or str(engine.engine))}[/]")
        tables.append(_table(_load_rows(engine)))
    return Group(*tables)


def _load_rows(load: control_pb2.EngineLoad) -> dict[str, str]:
    rows = {"sequences": f"{load.running} running, {load.waiting} waiting"}
    if not load.blocks_total:  # the server shows no more to a token that may not observe
        return rows
    rows |= {
        "KV blocks": f"{load.blocks_referenced} in use, {load.blocks_evictable} cached, {load.blocks_free} free "
        f"of {load.blocks_total}; {100 * load.kv_waste:.1f} % of the slots in use hold no token",
        "last step": f"{load.step_sequences} sequences, {load.step_tokens} tokens, {1e3 * load.step_time_s:.1f} ms",
        "since start": f"{load.steps} steps, {load.prompt_tokens} prompt tokens "
        f"({100 * load.prefix_hit_rate:.0f} % cached), {load.output_tokens} output tokens, "
        f"{load.preemptions} preemptions",
        "wasted": f"{load.recomputed_tokens} tokens computed again, {load.dropped_tokens} after their sequence's end",
    }
    if load.drafted_tokens or load.forced_tokens:
        rows["drafts"] = (
            f"{load.drafted_tokens} tokens drafted, {load.accepted_tokens} of them accepted; "
            f"{load.forced_tokens} tokens forced by grammars"
        )
    if load.host_blocks_total:
        rows["host memory"] = (
            f"{load.host_blocks_used} of {load.host_blocks_total} blocks in use, "
            f"{load.saved_tokens} tokens copied there, {load.loaded_tokens} back"
        )
        rows["host cache"] = f"{load.host_blocks_cached} blocks, {load.host_cached_tokens} prompt tokens found"
    if load.stored_blocks or load.stored_failed_blocks:
        rows["block store"] = (
            f"{load.stored_blocks} blocks, {load.stored_read_tokens} prompt tokens read; "
            f"{load.stored_failed_blocks} blocks not read or written"
        )
    return rows


def _tenants(load: control_pb2.Load) -> str:
    """One line per tenant, most served first; "(none)" stands for calls without a tenant."""
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


HEALTH_TIMEOUT_S = 3.0


def health(
    service: Annotated[str, typer.Option(help="Service to check. Empty checks the whole server.")] = "",
    address: Address = DEFAULT_ADDRESS,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Check whether a router or an engine is serving. The exit code is 0 if it is, 1 if not."""
    with errors_reported(address):
        if is_shm(address):
            answer = "SERVING" if asyncio.run(_says_hello(address)) else "UNAVAILABLE"
        else:
            answer = _grpc_health(service, address, tls_ca or tls)
    typer.echo(answer)
    raise typer.Exit(0 if answer == "SERVING" else 1)


async def _says_hello(address: str) -> bool:
    """Whether an engine on shared memory, which has no health service, greets this process as it does a router."""
    from pagoda.engine.v1 import engine_pb2
    from pagoda_server.channel import shm

    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            link: shm.ShmLink[engine_pb2.EngineMessage, engine_pb2.RouterMessage]
            link = await shm.connect(address, engine_pb2.EngineMessage.FromString)
            with contextlib.closing(link):
                return await link.read() is not None
    except OSError:
        return False


def _grpc_health(service: str, address: str, tls: bool | Path) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pagoda.connection import credentials
    from pagoda.fields import assign

    request = health_pb2.HealthCheckRequest()
    assign(request, "service", service)
    secret = credentials(tls)
    with grpc.secure_channel(address, secret) if secret else grpc.insecure_channel(address) as channel:
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=HEALTH_TIMEOUT_S).status
            answer: str = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
            return answer
        except grpc.RpcError as error:
            code: str = error.code().name
            return code
