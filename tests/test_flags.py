"""The engine's settings stand on two command lines and in two configurations: all of them agree."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from pagoda_server.cli.__main__ import serve
from pagoda_server.engine.__main__ import main as engine
from pagoda_server.engine.core.config import EngineConfig
from pagoda_server.router.process.config import ENGINE_SETTINGS, ServeConfig

NOT_PASSED_ON = {"context", "model", "listen", "log_level", "allow_insecure", "exit_with_parent"}


def options(command: Callable[..., None]) -> dict[str, tuple[Any, Any]]:
    """Type, which holds the choices, and default of each; typer takes names, choices and defaults from these."""
    hints = get_type_hints(command)
    return {name: (hints[name], given.default) for name, given in inspect.signature(command).parameters.items()}


def fields(configuration: Any) -> dict[str, tuple[Any, Any]]:
    hints = get_type_hints(configuration)
    return {field.name: (hints[field.name], field.default) for field in dataclasses.fields(configuration)}


@pytest.mark.parametrize("name", [*ENGINE_SETTINGS, "model", "log_level"])
def test_a_flag_of_the_engine_means_the_same_to_pagoda_serve(name: str) -> None:
    assert options(serve)[name] == options(engine)[name]


@pytest.mark.parametrize("name", ENGINE_SETTINGS)
def test_a_setting_of_the_engine_is_its_flag_in_both_configurations(name: str) -> None:
    assert fields(ServeConfig)[name] == options(serve)[name]
    if name != "step_ms":  # which the engine takes beside its configuration
        assert fields(EngineConfig)[name] == options(engine)[name]


def test_pagoda_serve_passes_on_every_flag_of_the_engine() -> None:
    assert options(engine).keys() - NOT_PASSED_ON == set(ENGINE_SETTINGS)
