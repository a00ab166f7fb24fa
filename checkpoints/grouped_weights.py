"""Weights of 4 bits in groups: the format of a folder that has them, and a copy of such a folder without quantization.

Three tensors take the place of a quantized weight W [out, in]; weight = scale * value + minimum:

W.values    U8   [out, groups, 16]: of a group of 32 inputs, the first 16 in low nibbles, the others in high nibbles
W.scales    F16  [out, groups]
W.minimums  F16  [out, groups]

`quantization_config` in config.json says that some weights are quantized, and tensor names show which. All other
tensors are stored as they are. The format does not depend on the file that the weights came from.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .cache import Cache
from .files import MANIFEST
from .folder import WEIGHTS, CheckpointError, read_json_object, write_json
from .progress import Progress, no_progress
from .safetensors_file import SafetensorsWriter, TensorEntry, read_entries

T = TypeVar("T", bound=np.generic)

BITS = 4
GROUP_SIZE = 32
GROUP_BYTES = GROUP_SIZE * BITS // 8
VALUES, SCALES, MINIMUMS = ".values", ".scales", ".minimums"

QUANTIZATION_CONFIG: dict[str, object] = {"quant_method": "pagoda", "bits": BITS, "group_size": GROUP_SIZE}


def quantized_names(tensors: Iterable[str]) -> frozenset[str]:
    """The quantized weights, found from the names of all tensors in a folder."""
    return frozenset(name.removesuffix(VALUES) for name in tensors if name.endswith(VALUES))


def dequantize(
    values: NDArray[np.uint8], scales: NDArray[np.float16], minimums: NDArray[np.float16]
) -> NDArray[np.float32]:
    """[rows, in] from arrays of the format above, or [groups, 32] from groups without rows."""
    nibbles = np.concatenate([values & 15, values >> 4], axis=-1).astype(np.float32)
    nibbles *= scales[..., None].astype(np.float32)
    nibbles += minimums[..., None].astype(np.float32)
    return nibbles.reshape(len(values), -1)


def dequantized(folder: Path, progress: Progress = no_progress) -> Path:
    """A folder that any reader of Hugging Face checkpoints understands: this one, or its copy if it is quantized.

    The copy lies in the cache and is made on first use. Its weights that were quantized are float32, which holds their
    values unrounded; others are unchanged.

    Raises CheckpointError if the folder is quantized and was not imported, or the copy cannot be written.
    """
    if "quantization_config" not in read_json_object(folder / "config.json"):
        return folder
    try:
        key = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise CheckpointError(f"{folder} is quantized and was not imported by Pagoda: {error}") from error
    cache = Cache(Cache.default().root / "dequantized")
    return cache.obtain(
        f"{folder.name}-{key}", lambda work, draft: write_dequantized(folder, draft, progress), progress
    )


def write_dequantized(folder: Path, target: Path, progress: Progress = no_progress) -> None:
    """Fill an empty folder with the files of another, its quantized weights in float32."""
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
