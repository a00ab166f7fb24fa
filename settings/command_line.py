"""A command whose options are the settings of a class."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import Field, fields
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer

from .setting import EXIT_CONFIG, PANELS, SettingError, Settings, about, flag
from .sources import FILE_VARIABLE, read_settings, variable

Config = TypeVar("Config", bound=Settings)


def command(config: type[Config], run: Callable[[Config], int]) -> Callable[..., None]:
    """A function for `typer.Typer().command()`: parses and checks `config`, runs, and exits with what `run` returns."""

    @wraps(run, assigned=("__doc__",), updated=())
    def run_alone(given: Config, origins: dict[str, str]) -> int:
        return run(given)

    return command_with_origins(config, run_alone)


def command_with_origins(config: type[Config], run: Callable[[Config, dict[str, str]], int]) -> Callable[..., None]:
    """The same for a `run` that is also given where settings come from, by name, if not from the command line.

    What the command line leaves out comes from the environment, or else from the file that --config names, or else it
    is the default and has no origin.
    """

    def call(context: typer.Context, _file: Path | None, **values: Any) -> None:
        if context.invoked_subcommand is not None:
            return  # it has settings of its own
        origins = _origins(context)
        try:
            given = config(**values)
        except SettingError as error:
            _refuse(f"{error}{_named(origins, str(error))}")
        raise typer.Exit(run(given, origins))

    def read(context: typer.Context, path: Path | None) -> Path | None:
        if path is not None:
            try:
                context.default_map = read_settings(path, config)
            except SettingError as error:
                _refuse(str(error))
        return path

    types = get_type_hints(config)
    ordered = sorted(fields(config), key=lambda declared: PANELS.index(about(declared).panel))
    file = typer.Option(
        "--config",
        envvar=FILE_VARIABLE,
        is_eager=True,
        callback=read,
        help="TOML file of settings, `name = value`. Options and environment variables win over it.",
    )
    call.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
            Parameter("_file", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, file]),
            *(_parameter(declared, types[declared.name]) for declared in ordered),
        ]
    )
    call.__doc__ = run.__doc__
    return call


def _refuse(error: str) -> NoReturn:
    typer.secho(f"error: {error}", fg="red", err=True)
    raise typer.Exit(EXIT_CONFIG) from None


def _origins(context: typer.Context) -> dict[str, str]:
    sources = {name: source.name for name in context.params if (source := context.get_parameter_source(name))}
    texts = {"ENVIRONMENT": lambda name: f"${variable(name)}", "DEFAULT_MAP": lambda name: str(context.params["_file"])}
    return {name: texts[source](name) for name, source in sources.items() if source in texts}


def _named(origins: dict[str, str], error: str) -> str:
    """The origins of the settings that an error names."""
    named = [name for name in sorted(origins) if re.search(rf"{flag(name)}(?![\w-])", error)]
    return f" ({', '.join(f'{flag(name)} is from {origins[name]}' for name in named)})" if named else ""


def _parameter(declared: Field[Any], kind: Any) -> Parameter:
    described = about(declared)
    option = typer.Option(
        envvar=variable(declared.name),
        help=described.help,
        rich_help_panel=described.panel,
        show_default=described.shown_default or True,
        metavar=f"<{described.unit}>" if described.unit else None,
    )
    return Parameter(
        declared.name, Parameter.KEYWORD_ONLY, default=declared.default, annotation=Annotated[kind, option]
    )
