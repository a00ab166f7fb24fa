"""Makes a Hugging Face folder for a .gguf file, which holds everything but the weights: those stay in the file."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .cache import Cache
from .files import read_manifest, sha256_of, written_whole
from .folder import GGUF, CheckpointError, linked_gguf, quoted, read_json_object, write_json
from .progress import Progress

if TYPE_CHECKING:
    from .gguf_file import GgufFile

ORIGIN = "origin.json"
_POOLINGS = {0: None, 1: "mean", 2: "cls", 3: "last"}  # llama.cpp's LLAMA_POOLING_TYPE


@dataclass(frozen=True, slots=True)
class Origin:
    """The file that a folder was made from.

    format      such as "GGUF Q4_K_M"
    parameters  how many weights it has
    pooling     how the model was trained to make a vector of hidden states: last, mean or cls
    """

    format: str | None = None
    parameters: int | None = None
    pooling: str | None = None


def read_origin(folder: Path) -> Origin:
    """What the import wrote down; nothing for a folder that was not imported."""
    try:
        found = read_json_object(folder / ORIGIN)
    except (FileNotFoundError, ValueError):
        return Origin()
    form, parameters, pooling = (found.get(name) for name in ("format", "parameters", "pooling"))
    return Origin(
        form if isinstance(form, str) else None,
        parameters if isinstance(parameters, int) else None,
        pooling if isinstance(pooling, str) else None,
    )


def obtain_gguf_model(path: Path, cache: Cache, progress: Progress) -> Path:
    """Return the folder made from this file's contents. A renamed or moved file is not imported again.

    Raises CheckpointError if the file is broken or its architecture, vocabulary or quantization is not supported.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-") or "model"
    try:
        remembered = _remembered(path, cache)
        # A large file that will be refused is not read whole before.
        file = None if remembered.is_file() else _opened(path, progress)
        sha256 = _content_key(path, remembered, progress)
        folder = cache.root / "models" / f"{stem}-{sha256[:12]}"
        _link_again(folder / GGUF, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be imported: {error}") from error

    def build(work: Path, draft: Path) -> dict[str, str]:
        import_gguf(path, draft, progress, file)
        (draft / GGUF).symlink_to(path.resolve())
        return {GGUF: sha256}

    return cache.obtain(folder.name, build, progress)


def check_linked(folder: Path, cache: Cache, progress: Progress) -> None:
    """Raise CheckpointError if an imported folder links to a file that is gone or has changed."""
    gguf = linked_gguf(folder)
    if gguf is None or not (folder / GGUF).is_symlink():
        return
    expected = {record.name: record.sha256 for record in read_manifest(folder) or []}
    if expected.get(GGUF) != _content_key(gguf, _remembered(gguf, cache), progress):
        raise CheckpointError(f"{gguf} has changed since {folder.name} was imported from it: give its path")


def _link_again(link: Path, path: Path) -> None:
    """Let the link of a folder that was imported before lead to the file, which may have been moved."""
    if link.is_symlink() and not (link.exists() and link.samefile(path)):
        new = link.with_name(f"{link.name}.{secrets.token_hex(4)}.partial")
        new.symlink_to(path.resolve())
        new.replace(link)


def import_gguf(path: Path, folder: Path, progress: Progress, file: GgufFile | None = None) -> None:
    """Fill an empty folder with config.json, the tokenizer and its settings, and check the values of the weights.

    The caller puts the file, or a link to it, beside them as model.gguf.

    file  the same file, if its header has been read before
    """
    # Imported here: a start from the cache needs neither NumPy nor the code for quantization.
    from .gguf_config import config_of, read_shape
    from .gguf_tokenizer import write_tokenizer
    from .gguf_weights import open_gguf_weights
    from .quantized_weights import GGUF as METHOD
    from .stored import check_values

    file = file or _opened(path, progress)
    tensors = open_gguf_weights(file)
    is_grouped = any(tensor.grouping for tensor in tensors.values())
    quantization = {"quantization_config": {"quant_method": METHOD}} if is_grouped else {}
    write_json(folder / "config.json", config_of(file, read_shape(file)) | quantization)
    write_tokenizer(file, folder)
    write_json(folder / ORIGIN, asdict(_origin(file)))
    done, total = 0, sum(tensor.num_bytes for tensor in tensors.values())
    for stored in tensors.values():
        check_values(quoted(stored.tensor.name), stored)
        done += stored.num_bytes
        progress("Checking the weights", done, total)


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
    parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    pooling = file.integer(key := f"{file.architecture}.pooling_type", 0)
    if pooling not in _POOLINGS:
        raise CheckpointError(f"{file.name}: {key} is {quoted(pooling)}, which is not computed; 0 to 3 are")
    return Origin(f"GGUF {names[kind]}" if kind in names else "GGUF", parameters, _POOLINGS[pooling])


def _opened(path: Path, progress: Progress) -> GgufFile:
    """The open file. Raises CheckpointError if its header shows that it cannot be imported."""
    from .gguf_file import GgufFile
    from .gguf_weights import open_gguf_weights

    size_bytes = path.stat().st_size
    progress("Reading the GGUF file", 0, size_bytes)
    file = GgufFile(path)
    open_gguf_weights(file)
    progress("Reading the GGUF file", size_bytes, size_bytes)
    return file
