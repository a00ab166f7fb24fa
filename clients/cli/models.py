"""`pagoda models`, `pull`, `list` and `rm`: which models can be served by name, and those that are here."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda_server.cli.progress import shown_progress
from pagoda_server.cli.terminal import errors_reported

if TYPE_CHECKING:
    from rich.table import Table

    from pagoda_server.checkpoints import AvailableModel

Name = Annotated[
    str, typer.Argument(help="A name that `pagoda models` lists, a folder, a .gguf file, or org/name of the Hub.")
]

AcceptTerms = Annotated[
    str | None, typer.Option(metavar="TERMS", help="Accept the terms of use of this name.", show_default=False)
]


def models() -> None:
    """List the models that `pagoda serve --model` knows by name, with their formats and sizes."""
    from rich.console import Console

    from pagoda_server.checkpoints import DEFAULT_MODEL, list_models

    with errors_reported():
        console = Console()
        table = _table("Name", "Family", "Format", "Params", "Size")
        found = list_models()
        for model in found:
            name = f"{model.name} (default)" if model.name == DEFAULT_MODEL else model.name
            table.add_row(name, model.family, model.format or "–", _parameters(model), _size(model))
        console.print(table)
        if any(model.download_bytes for model in found):
            console.print("[dim]↓ not here yet: the first use, or pagoda pull NAME, downloads it[/]", highlight=False)
        for parent in {model.folder.parent for model in found if model.folder}:
            console.print(f"[dim]imported into {parent}[/]", highlight=False, soft_wrap=True)
        console.print("[dim]also: a folder, a .gguf file, or a name on the Hugging Face Hub[/]", highlight=False)


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column != "Name")
    return table


def _parameters(model: AvailableModel) -> str:
    if model.parameters is None:
        return "–"
    billions = model.parameters / 1e9
    return f"{billions:.2f} B" if billions >= 1 else f"{1e3 * billions:.0f} M"


def _size(model: AvailableModel) -> str:
    if model.size_bytes is not None:
        return f"{model.size_bytes / 1e6:.1f} MB"
    return f"{model.download_bytes / 1e6:.0f} MB ↓" if model.download_bytes else "–"


def pull(name: Name, accept_terms: AcceptTerms = None) -> None:
    """Get a model before it is served: download it, verify it, import it. What was got before is not got again."""
    from pagoda_server.checkpoints import find_model

    with errors_reported(), shown_progress() as progress:
        settle_terms(name, accept_terms)
        typer.echo(find_model(name, progress, refreshes=True).folder)


def settle_terms(name: str, accepted: str | None) -> None:
    """Ask on a terminal, unless `accepted` names the terms. Elsewhere the import will say how to accept them."""
    from pagoda_server.checkpoints import accept_terms, missing_terms

    terms = missing_terms(name)
    if terms is None:
        return
    if accepted is not None and accepted != terms.name:
        raise typer.BadParameter(f"{name} has the terms {terms.name}", param_hint="--accept-terms")
    if accepted or (sys.stdin.isatty() and typer.confirm(f"{name} has terms of use, {terms.url}: accept them?")):
        accept_terms(terms)


def list_present() -> None:
    """List the models that are here, with formats, sizes and when they came."""
    from rich.console import Console

    from pagoda_server.checkpoints import list_models

    with errors_reported():
        table = _table("Name", "Family", "Format", "Params", "Size", "Modified")
        for model in list_models():
            if model.folder is not None and model.imported_s is not None:
                when = datetime.fromtimestamp(model.imported_s).strftime("%Y-%m-%d %H:%M")
                table.add_row(model.name, model.family, model.format or "–", _parameters(model), _size(model), when)
        Console().print(table)


def remove(name: Annotated[str, typer.Argument(help="A name that `pagoda list` shows.")]) -> None:
    """Remove a model from the cache. Files elsewhere stay, and a model that is being served is refused."""
    from pagoda_server.checkpoints import remove_model

    with errors_reported():
        remove_model(name)
    typer.echo(f"removed {name}")
