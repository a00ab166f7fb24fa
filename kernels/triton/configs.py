"""Launch configurations: a table for each GPU, tuned offline, and defaults. Nothing is tuned while serving."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import triton

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FOLDER = Path(__file__).parent / "tuned"

# Triton's interpreter runs kernels on CPU tensors, with NumPy. Its products of bfloat16 are wrong, so if this is set,
# kernels cast the operands of products to float32.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

Config = TypeVar("Config", bound="DataclassInstance")
Function = TypeVar("Function", bound=Callable[..., object])


def capability() -> int:
    """The compute capability of the current GPU, 90 for an H100; 0 if kernels are interpreted."""
    return 0 if IS_INTERPRETED else _capability(triton.runtime.driver.active.get_current_device())


@cache
def _capability(device: int) -> int:
    return int(triton.runtime.driver.active.get_current_target().arch)


@cache
def num_processors(device: torch.device) -> int:
    """The number of processors; 1 without a GPU, since the interpreter runs programs one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def tuned(op: str, key: str, default: Config) -> Config:
    """Return the configuration of `op` for the shapes `key` on this GPU, or `default` if the table has none.

    default  a frozen dataclass of integers
    """
    if _trial is not None and _trial.op == op:
        _trial.configs[key] = asdict(config := replace(default, **_trial.fields))
        return config
    fields = _table().get(op, {}).get(key)
    return default if fields is None else type(default)(**fields)


@dataclass(slots=True)
class _Trial:
    op: str
    fields: Mapping[str, int]
    configs: dict[str, dict[str, int]] = field(default_factory=dict)


_trial: _Trial | None = None
_remembered: list[Any] = []


def remembered(function: Function) -> Function:
    """`functools.cache` for functions that depend on `tuned`; `trying` clears it."""
    _remembered.append(cache(function))
    return cast(Function, _remembered[-1])


@contextmanager
def trying(op: str, **fields: int) -> Iterator[dict[str, dict[str, int]]]:
    """Give every configuration of `op` these fields within the block; yield the ones asked for, by key."""
    global _trial
    _trial = trial = _Trial(op, fields)
    _forget()
    try:
        yield trial.configs
    finally:
        _trial = None
        _forget()


def _forget() -> None:
    for function in _remembered:
        function.cache_clear()


@cache
def _table() -> dict[str, dict[str, dict[str, int]]]:
    if not torch.cuda.is_available():
        return {}
    path = table_path(torch.cuda.get_device_name())
    return json.loads(path.read_text())["configs"] if path.exists() else {}


def table_path(gpu: str) -> Path:
    """The path of the table for a GPU, given CUDA's name of it."""
    return FOLDER / f"{gpu.lower().replace(' ', '-')}.json"
