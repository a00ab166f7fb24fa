"""Weights from safetensors files straight into a model's parameters, one tensor at a time.

A weight that the checkpoint holds in 4 bits (checkpoints/grouped_weights.py) goes to an Int4Weight as it is, and to a
tensor dequantized.
"""

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

from pagoda_server.checkpoints.grouped_weights import MINIMUMS, SCALES, VALUES, quantized_names
from pagoda_server.checkpoints.progress import Progress, no_progress
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.kernels import Int4Weight

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INITIALIZER_RANGE = 0.02  # of random weights, as transformers has it
VALUES_AT_ONCE = 1 << 20  # dequantized at a time: it takes some 12 bytes a value until the rows are in their place

Place = Tensor | Int4Weight


def load_weights(folder: Path, places: Mapping[str, Place], progress: Progress = no_progress) -> None:
    """Fills `places`, by their names in the checkpoint, converting to their dtype and device.

    Beyond the places it needs memory for about one tensor. Tensors of the checkpoint that have no place are left alone.
    Raises ConfigError for a missing or broken file, and for a tensor that is missing or has another shape.
    """
    total = sum(place.nbytes for place in places.values())
    done = 0
    for path, names in _files(folder, places).items():
        for name in names:
            # Opened for each tensor: what is read of a mapped file counts as resident until the file is closed.
            with _opened(path) as file:
                _fill(places[name], file, name, path)
            done += places[name].nbytes
            progress("loading weights", done, total)


def quantized_weights(folder: Path) -> frozenset[str]:
    """The weights that the checkpoint holds in 4 bits. Raises ConfigError like `load_weights`."""
    index = folder / INDEX_FILE
    if index.exists():
        return quantized_names(_weight_map(index))
    with _opened(folder / SINGLE_FILE) as file:
        return quantized_names(file.keys())


def draw_weights(places: Mapping[str, Place]) -> None:
    """Fills `places` with random weights as untrained models have them, each on its own device: for measurements."""
    for name, place in places.items():
        assert isinstance(place, Tensor)
        if "norm" in name:
            place.fill_(1.0)
        else:
            place.normal_(std=INITIALIZER_RANGE)


def stored_dtype(folder: Path, name: str) -> torch.dtype:
    """The dtype of one of the checkpoint's tensors; bfloat16 if quantized. Raises ConfigError as `load_weights`."""
    ((path, _),) = _files(folder, [name]).items()
    with _opened(path) as file:
        if name in quantized_names(file.keys()):
            return torch.bfloat16
        dtype: torch.dtype = _find(file, name, path)[:0].dtype
        return dtype


def _fill(place: Place, file: Any, name: str, path: Path) -> None:
    if isinstance(place, Tensor) and name not in quantized_names(file.keys()):
        _check_shape(name, list(_find(file, name, path).get_shape()), list(place.shape), path)
        place.copy_(file.get_tensor(name))
        return
    values, scales, minimums = (_find(file, name + part, path) for part in (VALUES, SCALES, MINIMUMS))
    weight = Int4Weight(values[:], scales[:], minimums[:])
    _check_shape(name, list(weight.shape), list(place.shape), path)
    if isinstance(place, Tensor):
        rows = max(1, VALUES_AT_ONCE // place.shape[1])
        for target, part in zip(place.split(rows), weight.split(rows), strict=True):
            target.copy_(part.dequantize())
    else:
        place.copy_(weight)


def _check_shape(name: str, stored: list[int], wanted: list[int], path: Path) -> None:
    if stored != wanted:
        raise ConfigError(f"tensor {name} has shape {stored} in {path.name}, but config.json makes it {wanted}")


def _files(folder: Path, names: Iterable[str]) -> dict[Path, list[str]]:
    """The tensors to read from each file."""
    index = folder / INDEX_FILE
    if not index.exists():
        return {folder / SINGLE_FILE: list(names)}
    weight_map = _weight_map(index)
    files: defaultdict[Path, list[str]] = defaultdict(list)
    for name in names:
        stored = name if name in weight_map else name + VALUES
        if stored not in weight_map:
            raise ConfigError(f"tensor {name} is missing in {INDEX_FILE}")
        files[folder / str(weight_map[stored])].append(name)
    return dict(files)


def _weight_map(index: Path) -> dict[str, object]:
    try:
        return dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{index} is not the index of a sharded checkpoint") from None


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
