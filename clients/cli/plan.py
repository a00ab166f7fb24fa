"""`pagoda plan`: what a model will take in memory, and how many sequences fit beside it, before anything is started."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda_server.cli.models import Name, settle_terms
from pagoda_server.cli.progress import shown_progress
from pagoda_server.cli.terminal import errors_reported, print_error

if TYPE_CHECKING:
    from rich.table import Table

UNITS = {"MB": 1e6, "GB": 1e9, "MIB": 2**20, "GIB": 2**30}
ROUTER_BYTES = 81_000_000  # of a router with an empty vocabulary, and for each byte of tokenizer.json: docs/models.md
PER_TOKENIZER_BYTE = 30.5


@dataclass(frozen=True, slots=True)
class Plan:
    """What `python -m pagoda_server.engine.runners.plan` prints for a precision, and the router's memory."""

    quantization: str
    kernels: str
    weights: int
    rest: int
    kv_bytes_per_token: dict[str, int]
    max_model_len: int
    router: int

    @property
    def engine_bytes(self) -> int:
        """The engine's memory without its KV cache."""
        return self.weights + self.rest


def plan(
    name: Name,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, prompt and answer.")] = 2048,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory to plan for, such as 24GB.", show_default="this machine's"),
    ] = None,
) -> None:
    """Show what serving a model on this machine's processor will take: weights, KV cache, engine, router.

    Only headers of the weights are read. A model that is not here has to be pulled first.
    """
    from rich.console import Console

    from pagoda_server.checkpoints import find_model

    budget = _bytes_of(memory) if memory else _memory_here()
    with errors_reported():
        with shown_progress() as progress:
            settle_terms(name, None)
            model = find_model(name, progress)
        plans = asyncio.run(read_plans(model.folder))
    if not plans:
        raise typer.Exit(1)
    console = Console()
    console.print(_table(plans, tokens, budget))
    longest = plans[0].max_model_len
    if tokens > longest:
        console.print(f"[dim]the model takes at most {longest} tokens[/]", highlight=False)
    console.print(
        f"[dim]sequences: of {tokens} tokens each, in {budget / 1e9:.1f} GB; --kv-cache-gb sets the cache's size[/]",
        highlight=False,
    )


def _table(plans: list[Plan], tokens: int, budget: float) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("Precision", "Weights", "Engine", "Router", "In all", "KV cache", "A token", "Sequences"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("Precision", "KV cache") else "right")
    auto = next((each.kernels for each in plans if each.quantization == "auto"), None)
    for each in plans:
        if each.quantization == "auto" and len(plans) > 1:
            continue
        name = f"{each.quantization} (auto)" if each.kernels == auto else each.quantization
        rest = each.engine_bytes + each.router
        row = [name, *(_megabytes(size) for size in (each.weights, each.rest, each.router, rest))]
        for dtype, per_token in each.kv_bytes_per_token.items():
            fitting = max(0, int((budget - rest) // (per_token * tokens)))
            table.add_row(*row, dtype, f"{per_token / 1e3:.1f} kB", f"{fitting:,}")
            row = [""] * len(row)
    return table


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


async def read_plans(folder: Path) -> list[Plan]:
    """The plans for a model's folder; prints why there are none. A process of its own makes them: it needs torch."""
    command = [sys.executable, "-m", "pagoda_server.engine.runners.plan", str(folder)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    stdout, stderr = await process.communicate()
    if process.returncode:
        lines = stderr.decode(errors="replace").strip().splitlines()
        print_error((lines or ["the plan failed"])[-1].removeprefix("error: "))
        return []
    router = ROUTER_BYTES + round(PER_TOKENIZER_BYTE * (folder / "tokenizer.json").stat().st_size)
    return [Plan(**fields, router=router) for fields in json.loads(stdout)]


def _bytes_of(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)\s*([KMG]i?B)", text, re.IGNORECASE)
    if not found or found[2].upper() not in UNITS:
        raise typer.BadParameter(f"must be a size such as 24GB or 512MB, not {text}", param_hint="--memory")
    return float(found[1]) * UNITS[found[2].upper()]


def _memory_here() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
