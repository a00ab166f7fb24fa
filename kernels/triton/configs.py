"""Launch configurations: a table made offline for each GPU, and defaults. Nothing is tuned while serving."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

FOLDER = Path(__file__).parent / "tuned"

# Triton's interpreter runs kernels on CPU tensors, with NumPy. It multiplies bfloat16 wrongly: where this is set,
# kernels cast the operands of a product to float32.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

Config = TypeVar("Config")


def tuned(op: str, key: str, default: Config) -> Config:
    """The configuration of `op` for shapes called `key` on this GPU; the default's fields, where the table has none.

    default  a frozen dataclass of integers
    """
    fields = _table().get(op, {}).get(key)
    return default if fields is None else type(default)(**fields)


@cache
def _table() -> dict[str, dict[str, dict[str, int]]]:
    if not torch.cuda.is_available():
        return {}
    path = FOLDER / f"{torch.cuda.get_device_name().lower().replace(' ', '-')}.json"
    return json.loads(path.read_text())["configs"] if path.exists() else {}
