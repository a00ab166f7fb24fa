"""A copy of an imported folder that any reader of Hugging Face checkpoints understands: nothing in it is quantized."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagoda_server.checkpoints.cache import Cache
from pagoda_server.checkpoints.errors import CheckpointError
from pagoda_server.checkpoints.grouped_weights import (
    GROUP_BYTES,
    GROUP_SIZE,
    MINIMUMS,
    SCALES,
    VALUES,
    dequantize,
    quantized_names,
)
from pagoda_server.checkpoints.json_file import read_json_object, write_json
from pagoda_server.checkpoints.local import WEIGHTS
from pagoda_server.checkpoints.manifest import MANIFEST
from pagoda_server.checkpoints.progress import Progress, no_progress
from pagoda_server.checkpoints.safetensors_file import SafetensorsWriter, TensorEntry, read_entries

T = TypeVar("T", bound=np.generic)


def dequantized(folder: Path, progress: Progress = no_progress) -> Path:
    """The folder itself if it is not quantized, else its copy in the cache, made on first use.

    Weights that were quantized are float32 there, which holds their values unrounded; others are as they were.

    Raises CheckpointError if the folder is quantized and was not imported, or the copy cannot be written.
    """
    if "quantization_config" not in read_json_object(folder / "config.json"):
        return folder
    try:
        key = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise CheckpointError(f"{folder} is quantized, and no import of Pagoda's: {error}") from error
    cache = Cache(Cache.default().root / "dequantized")
    return cache.obtain(
        f"{folder.name}-{key}", lambda work, draft: write_dequantized(folder, draft, progress), progress
    )


def write_dequantized(folder: Path, target: Path, progress: Progress = no_progress) -> None:
    """Fills an empty folder with the files of another, its quantized weights in float32."""
    for path in folder.iterdir():
        if path.name not in (WEIGHTS, MANIFEST, "config.json"):
            shutil.copy(path, target)
    config = read_json_object(folder / "config.json")
    write_json(target / "config.json", {name: value for name, value in config.items() if name != "quantization_config"})
    _write_weights(folder / WEIGHTS, target / WEIGHTS, progress)


def _write_weights(source: Path, target: Path, progress: Progress) -> None:
    stored = read_entries(source)
    quantized = sorted(quantized_names(stored))
    parts = {name + part for name in quantized for part in (VALUES, SCALES, MINIMUMS)}
    plain = [entry for name, (entry, _) in stored.items() if name not in parts]
    entries = [_whole(name, stored[name + VALUES][0]) for name in quantized] + plain
    total = sum(entry.num_bytes for entry in entries)

    def read(name: str, dtype: type[T]) -> NDArray[T]:
        entry, start = stored[name]
        return np.fromfile(source, dtype, entry.num_bytes // np.dtype(dtype).itemsize, offset=start)

    done = 0
    with SafetensorsWriter(target, entries) as writer:
        for entry in entries:
            if entry.name in stored:
                writer.write(read(entry.name, np.uint8))
            else:
                values = read(entry.name + VALUES, np.uint8).reshape(-1, GROUP_BYTES)
                scales, minimums = (read(entry.name + part, np.float16) for part in (SCALES, MINIMUMS))
                writer.write(dequantize(values, scales, minimums))
            done += entry.num_bytes
            progress("Dequantizing the weights", done, total)


def _whole(name: str, values: TensorEntry) -> TensorEntry:
    out_size, groups, _ = values.shape
    return TensorEntry(name, "F32", (out_size, groups * GROUP_SIZE), 4)
