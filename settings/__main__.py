"""`python -m pagoda_server.settings`: prints docs/settings.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from . import EngineConfig, EngineSettings, ServeConfig
from .engine import CommonSettings
from .fleet import FleetConfig
from .setting import PANELS, Settings, about, flag

_INTRODUCTION = """\
# Settings

<!-- `make settings` writes this page from settings/; edit the texts there. -->

`pagoda serve` takes every option except those of the last section. It passes the engine's options on to the engine that
it spawns. `python -m pagoda_server.engine` runs an engine apart; it takes the engine's options and those of the last
section. An option can also come from the environment, `--max-requests` from `PAGODA_MAX_REQUESTS`, or from a file that
`--config` names ([Settings from a file](operations.md#settings-from-a-file-and-the-environment)).
[operations.md](operations.md) explains options that work together. `GetServerInfo` reports the values in
effect, except paths and addresses.
"""


def page() -> str:
    """The whole of docs/settings.md."""
    parts = [_INTRODUCTION]
    for panel in PANELS:
        parts.append(f"## {'Router' if panel == PANELS[0] else panel}\n")
        parts.append(_table(ServeConfig, [field for field in fields(ServeConfig) if about(field).panel == panel]))
    inherited = {field.name for field in fields(EngineSettings)}
    parts.append("## An engine that runs apart\n")
    parts.append(_table(EngineConfig, [field for field in fields(EngineConfig) if field.name not in inherited]))
    parts.append("## A fleet\n")
    parts.append("`pagoda fleet` ([fleet.md](fleet.md)) takes these and the engine's options, but for `--channel-*`.\n")
    parts.append(_table(FleetConfig, [field for field in fields(FleetConfig) if field.name not in inherited]))
    return "\n".join(parts)


def _table(config: type[Settings], declared: list[Field[Any]]) -> str:
    types = get_type_hints(config)
    common = {field.name for field in fields(CommonSettings)}
    rows = ["| option | values | default | what it does |", "|---|---|---|---|"]
    for field in declared:
        described, kind = about(field), types[field.name]
        both = " Also the engine's." if field.name in common else ""
        cells = (_spellings(field, kind), ", ".join(_values(field, kind)), _default(field), described.help + both)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _kinds(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is UnionType else (kind,)


def _spellings(field: Field[Any], kind: Any) -> str:
    names = [field.name]
    if bool in _kinds(kind):
        names.append(f"no_{field.name}")
    return ", ".join(f"`{flag(name)}`" for name in names)


def _values(field: Field[Any], kind: Any) -> Iterator[str]:
    described = about(field)
    for each in _kinds(kind):
        if get_origin(each) is Literal:
            yield from (f"`{choice}`" for choice in get_args(each))
        elif each in (int, float):
            yield f"{described.unit}, {described.range}"


def _default(field: Field[Any]) -> str:
    if shown := about(field).shown_default:
        return shown
    match field.default:
        case None | "":
            return "none"
        case bool(is_on):
            return "on" if is_on else "off"
        case value:
            return f"`{value}`"


if __name__ == "__main__":
    print(page(), end="")
