"""`pagoda config`: what a server would run with, and whether it can."""

from __future__ import annotations

import json
from dataclasses import fields

import typer

from pagoda_server.cli.terminal import print_error
from pagoda_server.settings import EXIT_CONFIG, ServeConfig, SettingError
from pagoda_server.settings.command_line import command_with_origins
from pagoda_server.settings.setting import PANELS, about
from pagoda_server.settings.sources import misspelt_variables

config = typer.Typer(help="Show or check the settings that `pagoda serve` would run with.", no_args_is_help=True)


def _show(given: ServeConfig, origins: dict[str, str]) -> int:
    """Print every setting that `pagoda serve` would have with these options, as a file for --config."""
    for panel in PANELS:
        typer.echo(f"# {panel}")
        for declared in fields(ServeConfig):
            if about(declared).panel == panel:
                typer.echo(_line(declared.name, getattr(given, declared.name), declared.default, origins))
        typer.echo()
    return 0


def _line(name: str, value: object, default: object, origins: dict[str, str]) -> str:
    if value is None:
        return f"# {name}: {about(ServeConfig.__dataclass_fields__[name]).shown_default or 'none'}"
    text = f"{name} = {json.dumps(value, ensure_ascii=False)}"  # of these kinds, JSON's values are TOML's too
    if name in origins:
        return f"{text}  # from {origins[name]}"
    return text if value != default else f"# {text}"


def _check(given: ServeConfig, origins: dict[str, str]) -> int:
    """Check these settings and the files that they name, as `pagoda serve` does before it looks for the model."""
    from pagoda_server.router.errors import ConfigError
    from pagoda_server.router.process.main import check

    for name, meant in misspelt_variables(ServeConfig):
        typer.echo(f"${name} is not read: a setting's variable is ${meant}")
    try:
        check(given)
    except (SettingError, ConfigError) as error:
        print_error(str(error))
        return EXIT_CONFIG
    for name, origin in origins.items():
        typer.echo(f"{name} is from {origin}")
    typer.echo("the settings are good")
    return 0


config.command("show")(command_with_origins(ServeConfig, _show))
config.command("check")(command_with_origins(ServeConfig, _check))
