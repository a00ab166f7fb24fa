"""Where settings come from besides the command line: environment variables, and a file that --config names.

An option of the command line wins over the variable `PAGODA_NAME`, the variable over the file, and the file over the
default. In the file, which is TOML, a setting is `name = value`, with hyphens or underscores.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from .setting import SettingError, Settings, flag

Config = TypeVar("Config", bound=Settings)

PREFIX = "PAGODA_"
FILE_VARIABLE = f"{PREFIX}CONFIG"  # the file, where --config does not name it
MOST_BYTES = 1 << 20  # of a file of settings
_KINDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"{PREFIX}{name.upper()}"


def read_settings(path: Path, config: type[Settings]) -> dict[str, object]:
    """The settings in a file by name, each of its kind.

    Raises SettingError, which names the file and the key, for a file that cannot be read, a key that is no setting of
    `config` or is there twice, and a value of another kind.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise SettingError(f"--config: {path} has more than {MOST_BYTES} bytes")
        given = tomllib.loads(content.decode())
    except OSError as error:
        raise SettingError(f"--config: {path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingError(f"--config: {path} is not TOML: {error}") from None
    kinds = get_type_hints(config)
    settings: dict[str, object] = {}
    for key, value in given.items():
        if (name := key.replace("-", "_")) not in config.__dataclass_fields__:
            raise SettingError(f"--config: {path}: {key!r} is no setting{_hint(name, config)}")
        if name in settings:
            raise SettingError(f"--config: {path}: {name} is there twice, with hyphens and with underscores")
        kind = _kind(kinds[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise SettingError(f"--config: {path}: {key} must be {_KINDS[kind]}, not {value!r}")
        settings[name] = value
    return settings


def misspelt_variables(config: type[Settings]) -> list[tuple[str, str]]:
    """Environment variables that are nearly called like a setting's, each with the one that was probably meant.

    Others with the prefix are left alone: Kubernetes gives each container some that begin with a service's name.
    """
    known = {variable(declared.name) for declared in fields(config)}
    near = {
        name: difflib.get_close_matches(name, known, n=1, cutoff=0.9)
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known
    }
    return [(name, meant[0]) for name, meant in near.items() if meant]


def environment_without_settings(environment: Mapping[str, str], config: type[Settings]) -> dict[str, str]:
    """The environment of a process that gets all its settings as arguments."""
    settings = {FILE_VARIABLE, *(variable(declared.name) for declared in fields(config))}
    return {name: value for name, value in environment.items() if name not in settings}


def plain_settings(arguments: Sequence[str], config: type[Config]) -> Config | None:
    """The settings of a command line that has nothing but `--name=value`, `--name value`, `--name` and `--no-name`.

    None if it has anything else or a value that is refused, or if the environment has settings: then a parser of
    command lines reads it and says what is wrong. Its import takes as long as a sixth of torch's.
    """
    declared = get_type_hints(config)
    if len(environment_without_settings(os.environ, config)) != len(os.environ):
        return None
    found: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        option, has_value, text = argument.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if name not in declared:
            name = name.removeprefix("no_")
        if name not in declared or name in found or option not in (flag(name), flag(f"no_{name}")):
            return None
        if (kind := _kind(declared[name])) is bool:
            if has_value:
                return None
            found[name] = option == flag(name)
            continue
        value = text if has_value else next(rest, "--")
        choices = _choices(declared[name])
        if option != flag(name) or (not has_value and value.startswith("-")) or (choices and value not in choices):
            return None
        try:
            found[name] = kind(value)
        except ValueError:
            return None
    try:
        return config(**found)
    except SettingError:  # the parser names where the value is from
        return None


def _kind(declared: Any) -> type:
    """What a setting's value is, unless it is None: one of the keys of _KINDS."""
    kind = _unless_none(declared)
    return kind if kind in _KINDS else str


def _choices(declared: Any) -> tuple[str, ...]:
    """The values that a setting can have, if they are listed."""
    kind = _unless_none(declared)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _unless_none(declared: Any) -> Any:
    return (
        next(each for each in get_args(declared) if each is not NoneType)
        if isinstance(declared, UnionType)
        else declared
    )


def _hint(name: str, config: type[Settings]) -> str:
    near = difflib.get_close_matches(name, [declared.name for declared in fields(config)], n=1)
    return f"; did you mean {near[0]}?" if near else ""
