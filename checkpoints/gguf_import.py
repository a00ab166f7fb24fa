"""Converts a .gguf file to a Hugging Face folder."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .cache import Cache
from .files import sha256_of, written_whole
from .folder import CheckpointError, read_json_object, write_json
from .progress import Progress

if TYPE_CHECKING:
    from .gguf_file import GgufFile

ORIGIN = "origin.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """The file that a folder was made from: its format, such as "GGUF Q4_K_M", and its number of parameters."""

    format: str | None = None
    parameters: int | None = None


def read_origin(folder: Path) -> Origin:
    """What the import wrote down; nothing for a folder that was not imported."""
    try:
        found = read_json_object(folder / ORIGIN)
    except (FileNotFoundError, ValueError):
        return Origin()
    form, parameters = found.get("format"), found.get("parameters")
    return Origin(form if isinstance(form, str) else None, parameters if isinstance(parameters, int) else None)


def obtain_gguf_model(path: Path, cache: Cache, progress: Progress) -> Path:
    """Return the folder made from this file's contents. A renamed or moved file is not imported again.
    Raises CheckpointError if the file is broken or its architecture, vocabulary or quantization is not supported.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-") or "model"
    try:
        remembered = _remembered(path, cache)
        # A large file that will be refused is not read whole before.
        file = None if remembered.is_file() else _checked(path, progress)
        name = f"{stem}-{_content_key(path, remembered, progress)[:12]}"
    except OSError as error:
        raise CheckpointError(f"{path} cannot be imported: {error}") from error
    return cache.obtain(name, lambda work, draft: import_gguf(path, draft, progress, file), progress)


def import_gguf(path: Path, folder: Path, progress: Progress, file: GgufFile | None = None) -> None:
    """Fill an empty folder with config.json, model.safetensors, the tokenizer and its settings.

    file  the same file, if its header has been read before: that takes seconds
    """
    # Imported here: a start from the cache needs neither NumPy nor the code for quantization.
    from .gguf_config import config_of, read_shape
    from .gguf_tokenizer import write_tokenizer
    from .gguf_weights import has_grouped_weights, write_weights
    from .grouped_weights import QUANTIZATION_CONFIG

    file = file or _checked(path, progress)
    shape = read_shape(file)
    quantization = {"quantization_config": QUANTIZATION_CONFIG} if has_grouped_weights(file) else {}
    write_json(folder / "config.json", config_of(file, shape) | quantization)
    write_tokenizer(file, folder)
    write_weights(file, shape, folder / "model.safetensors", progress)
    write_json(folder / ORIGIN, asdict(_origin(file)))


def _remembered(path: Path, cache: Cache) -> Path:
    """Where the file's SHA-256 is kept until its path, size, inode or modification time changes."""
    stat = path.stat()
    if stat.st_size == 0:
        raise CheckpointError(f"{path} is empty")
    identity = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ino}"
    return cache.root / "sources" / hashlib.sha256(identity.encode()).hexdigest()


def _content_key(path: Path, remembered: Path, progress: Progress) -> str:
    if remembered.is_file():
        return remembered.read_text()
    size_bytes = path.stat().st_size
    key = sha256_of(path, lambda done: progress(f"Checksumming {path.name}", done, size_bytes))
    remembered.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(remembered) as partial:
        partial.write_text(key)
    return key


def _origin(file: GgufFile) -> Origin:
    from gguf.constants import LlamaFileType

    kind = file.integer("general.file_type", -1)
    names = {each.value: each.name.removeprefix("MOSTLY_").removeprefix("ALL_") for each in LlamaFileType}
    parameters = sum(int(tensor.n_elements) for tensor in file.tensors.values())
    return Origin(f"GGUF {names[kind]}" if kind in names else "GGUF", parameters)


def _checked(path: Path, progress: Progress) -> GgufFile:
    """The open file. Raises CheckpointError if its header shows that it cannot be imported."""
    from .gguf_config import read_shape
    from .gguf_file import GgufFile
    from .gguf_weights import check_tensors

    size_bytes = path.stat().st_size
    progress("Reading the GGUF file", 0, size_bytes)
    file = GgufFile(path)
    check_tensors(file, read_shape(file))
    progress("Reading the GGUF file", size_bytes, size_bytes)
    return file
