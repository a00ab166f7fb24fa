"""A copy of a model folder without quantization, as any reader of Hugging Face checkpoints understands it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np

from .cache import Cache
from .files import MANIFEST
from .folder import GGUF, WEIGHTS, CheckpointError, linked_gguf, read_config, write_json
from .progress import Progress, no_progress
from .safetensors_file import SafetensorsWriter
from .stored import StoredTensor, pieces, widened
from .weight_files import open_weights


def dequantized(folder: Path, progress: Progress = no_progress) -> Path:
    """This folder, or its copy if its weights are quantized or in a GGUF file.

    The copy lies in the cache and is made on first use. Its weights are float32, which holds their values unrounded.

    Raises CheckpointError if a copy is needed of a folder that was not imported, or cannot be written.
    """
    if linked_gguf(folder) is None and "quantization_config" not in read_config(folder):
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
    """Fill an empty folder with the files of another, its weights in float32."""
    for path in folder.iterdir():
        if path.name not in (GGUF, MANIFEST, "config.json") and path.suffix != ".safetensors":
            shutil.copy(path, target)
    config = read_config(folder)
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    write_json(target / "config.json", plain)
    tensors = open_weights(folder)
    total, done = sum(tensor.num_bytes for tensor in tensors.values()), 0
    with SafetensorsWriter(target / WEIGHTS, {name: tensor.shape for name, tensor in tensors.items()}) as writer:
        for tensor in tensors.values():
            for rows in pieces(tensor.shape):
                writer.write(_float32(tensor, rows))
            tensor.release()
            done += tensor.num_bytes
            progress("Dequantizing the weights", done, total)


def _float32(tensor: StoredTensor, rows: slice) -> np.ndarray:
    values = tensor.whole(rows)
    return widened(values) if tensor.encoding == "BF16" else values.astype(np.float32, copy=False)
