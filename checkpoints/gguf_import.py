"""Converts a .gguf file to a Hugging Face folder."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from pagoda_server.checkpoints.cache import Cache
from pagoda_server.checkpoints.files import sha256_of, written_whole
from pagoda_server.checkpoints.folder import CheckpointError, write_json
from pagoda_server.checkpoints.progress import Progress


def obtain_gguf_model(path: Path, cache: Cache, progress: Progress) -> Path:
    """Return the folder made from this file's contents. A renamed or moved file is not imported again.
    Raises CheckpointError if the file is broken or its architecture, vocabulary or quantization is not supported.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-") or "model"
    try:
        name = f"{stem}-{_content_key(path, cache, progress)[:12]}"
    except OSError as error:
        raise CheckpointError(f"{path} cannot be imported: {error}") from error
    return cache.obtain(name, lambda work, draft: import_gguf(path, draft, progress), progress)


def import_gguf(path: Path, folder: Path, progress: Progress) -> None:
    """Fill an empty folder with config.json, model.safetensors, the tokenizer and its settings."""
    # Imported here: a start from the cache needs neither NumPy nor the code for quantization.
    from pagoda_server.checkpoints.gguf_config import config_of, read_shape
    from pagoda_server.checkpoints.gguf_file import GgufFile
    from pagoda_server.checkpoints.gguf_tokenizer import write_tokenizer
    from pagoda_server.checkpoints.gguf_weights import has_grouped_weights, write_weights
    from pagoda_server.checkpoints.grouped_weights import QUANTIZATION_CONFIG

    size_bytes = path.stat().st_size
    progress("Reading the GGUF file", 0, size_bytes)
    file = GgufFile(path)
    shape = read_shape(file)
    quantization = {"quantization_config": QUANTIZATION_CONFIG} if has_grouped_weights(file) else {}
    write_json(folder / "config.json", config_of(file, shape) | quantization)
    write_tokenizer(file, folder)
    progress("Reading the GGUF file", size_bytes, size_bytes)
    write_weights(file, shape, folder / "model.safetensors", progress)


def _content_key(path: Path, cache: Cache, progress: Progress) -> str:
    """The file's SHA-256, remembered until its path, size, inode or modification time changes."""
    stat = path.stat()
    if stat.st_size == 0:
        raise CheckpointError(f"{path} is empty")
    identity = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ino}"
    remembered = cache.root / "sources" / hashlib.sha256(identity.encode()).hexdigest()
    if remembered.is_file():
        return remembered.read_text()
    _check_readable(path)  # a large file that will be refused is not read whole before
    key = sha256_of(path, lambda done: progress(f"Checksumming {path.name}", done, stat.st_size))
    remembered.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(remembered) as partial:
        partial.write_text(key)
    return key


def _check_readable(path: Path) -> None:
    """Raise CheckpointError if the header of the file shows that it cannot be imported."""
    from pagoda_server.checkpoints.gguf_config import read_shape
    from pagoda_server.checkpoints.gguf_file import GgufFile
    from pagoda_server.checkpoints.gguf_weights import check_tensors

    file = GgufFile(path)
    check_tensors(file, read_shape(file))
