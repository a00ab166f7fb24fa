"""Weights from safetensors files straight into a model's parameters, one tensor at a time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoints.progress import Progress, no_progress
from engine.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INITIALIZER_RANGE = 0.02  # of random weights, as transformers has it


def load_weights(folder: Path, places: Mapping[str, Tensor], progress: Progress = no_progress) -> None:
    """Fills `places`, tensors by their names in the checkpoint, converting to their dtype and device.

    Beyond the places it needs memory for about one tensor. Tensors of the checkpoint that have no place are left alone.
    Raises ConfigError for a missing or broken file, and for a tensor that is missing or has another shape.
    """
    total = sum(place.nbytes for place in places.values())
    done = 0
    for path, names in _files(folder, places).items():
        for name in names:
            # Opened for each tensor: what is read of a mapped file counts as resident until the file is closed.
            with _opened(path) as file:
                stored = _find(file, name, path)
                if stored.get_shape() != list(places[name].shape):
                    raise ConfigError(
                        f"tensor {name} has shape {stored.get_shape()} in {path.name}, "
                        f"but config.json makes it {list(places[name].shape)}"
                    )
                places[name].copy_(file.get_tensor(name))
            done += places[name].nbytes
            progress("loading weights", done, total)


def draw_weights(places: Mapping[str, Tensor]) -> None:
    """Fills `places` with random weights as untrained models have them, each on its own device: for measurements."""
    for name, place in places.items():
        if "norm" in name:
            place.fill_(1.0)
        else:
            place.normal_(std=INITIALIZER_RANGE)


def stored_dtype(folder: Path, name: str) -> torch.dtype:
    """The dtype of one of the checkpoint's tensors. Raises ConfigError like `load_weights`."""
    ((path, _),) = _files(folder, [name]).items()
    with _opened(path) as file:
        dtype: torch.dtype = _find(file, name, path)[:0].dtype
        return dtype


def _files(folder: Path, names: Iterable[str]) -> dict[Path, list[str]]:
    """The tensors to read from each file."""
    index = folder / INDEX_FILE
    if not index.exists():
        return {folder / SINGLE_FILE: list(names)}
    try:
        weight_map = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{index} is not the index of a sharded checkpoint") from None
    files: defaultdict[Path, list[str]] = defaultdict(list)
    for name in names:
        if name not in weight_map:
            raise ConfigError(f"tensor {name} is missing in {INDEX_FILE}")
        files[folder / str(weight_map[name])].append(name)
    return dict(files)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise ConfigError(f"the model folder has no {path.name}: {path.parent}") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None


def _find(file: Any, name: str, path: Path) -> Any:
    try:
        return file.get_slice(name)
    except SafetensorError:
        raise ConfigError(f"tensor {name} is missing in {path.name}") from None
