"""The options of a command that samples, made from the specification of sampling parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from pagoda_server.settings.sampling import PARAMETERS


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's argument `sampling` by an option for each parameter, and one for the seed.

    The command gets as `sampling` the options that were given, by name.
    """
    options = {
        each.name: _option(each.help, f"{each.default:g}", int if each.is_integer else float) for each in PARAMETERS
    }
    options["seed"] = _option("The same seed gives the same answer.", False, int)

    @wraps(command)
    def sampled(**given: Any) -> None:
        values = {name: given.pop(name) for name in options}
        command(**given, sampling={name: value for name, value in values.items() if value is not None})

    types = get_type_hints(command, localns={"GenerateOptions": dict}, include_extras=True)  # imported for mypy alone
    own = [each for each in inspect.signature(command).parameters.values() if each.name != "sampling"]
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in options]
    sampled.__annotations__ = {each.name: types[each.name] for each in own} | options
    sampled.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(annotation=sampled.__annotations__[each.name]) for each in (*own, *added)]
    )
    return sampled


def _option(help: str, shown_default: str | bool, kind: type) -> Any:
    return Annotated[kind | None, typer.Option(help=help, show_default=shown_default, rich_help_panel="Sampling")]
