"""Launch configurations: a table made offline for each GPU, and defaults. Nothing is tuned while serving."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FOLDER = Path(__file__).parent / "tuned"

# Triton's interpreter runs kernels on CPU tensors, with NumPy. It multiplies bfloat16 wrongly: where this is set,
# kernels cast the operands of a product to float32.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

Config = TypeVar("Config", bound="DataclassInstance")


def tuned(op: str, key: str, default: Config) -> Config:
    """The configuration of `op` for shapes called `key` on this GPU; the default's fields, where the table has none.

    default  a frozen dataclass of integers
    """
    if _trial is not None and _trial.op == op:
        _trial.keys.add(key)
        return replace(default, **_trial.fields)
    fields = _table().get(op, {}).get(key)
    return default if fields is None else type(default)(**fields)


@dataclass(slots=True)
class _Trial:
    op: str
    fields: Mapping[str, int]
    keys: set[str] = field(default_factory=set)


_trial: _Trial | None = None


@contextmanager
def trying(op: str, **fields: int) -> Iterator[set[str]]:
    """Within the block, configurations of `op` are its defaults with these fields; yields the keys asked for."""
    global _trial
    _trial = trial = _Trial(op, fields)
    try:
        yield trial.keys
    finally:
        _trial = None


@cache
def _table() -> dict[str, dict[str, dict[str, int]]]:
    if not torch.cuda.is_available():
        return {}
    path = table_path(torch.cuda.get_device_name())
    return json.loads(path.read_text())["configs"] if path.exists() else {}


def table_path(gpu: str) -> Path:
    """Where the table is of a GPU that CUDA calls by this name."""
    return FOLDER / f"{gpu.lower().replace(' ', '-')}.json"
