"""A command whose options are the settings of a class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from .setting import EXIT_CONFIG, PANELS, SettingError, Settings, about, flag

Config = TypeVar("Config", bound=Settings)


def command(config: type[Config], run: Callable[[Config], int]) -> Callable[..., None]:
    """A function for `typer.Typer().command()`: parses and checks `config`, runs, and exits with what `run` returns."""

    def call(**values: Any) -> None:
        try:
            given = config(**values)
        except SettingError as error:
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(EXIT_CONFIG) from None
        raise typer.Exit(run(given))

    types = get_type_hints(config)
    ordered = sorted(fields(config), key=lambda declared: PANELS.index(about(declared).panel))
    call.__signature__ = Signature([_parameter(declared, types[declared.name]) for declared in ordered])  # type: ignore[attr-defined]
    call.__doc__ = run.__doc__
    return call


def _parameter(declared: Field[Any], kind: Any) -> Parameter:
    described = about(declared)
    option = typer.Option(
        *_spellings(declared),
        help=described.help,
        rich_help_panel=described.panel,
        show_default=described.shown_default or True,
        metavar=f"<{described.unit}>" if described.unit else None,
    )
    return Parameter(
        declared.name, Parameter.KEYWORD_ONLY, default=declared.default, annotation=Annotated[kind, option]
    )


def _spellings(declared: Field[Any]) -> list[str]:
    """The option's spellings, where typer's are wrong: a switch that is off by default has no --no- form."""
    return [flag(declared.name)] if declared.default is False else []
