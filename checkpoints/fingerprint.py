"""A name for the weights of a model folder that follows from their files alone, whatever precision serves them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from .folder import CheckpointError, linked_gguf, quoted, read_config, weight_files
from .safetensors_header import header_of

PIECES, PIECE_BYTES = 4, 64  # of each tensor, from its first byte to its last: other weights differ in some of them


def weights_fingerprint(folder: Path) -> str:
    """SHA-256, in hex, over each tensor's name, type and shape, and pieces of its bytes. Empty: nothing is stored.

    How a checkpoint is split into files does not matter. Raises CheckpointError if a file is missing or broken.
    """
    config = read_config(folder)
    if config.get("random_weights") is True:
        return ""
    if config.get("model_type") == "synthetic":
        tensors = [f"synthetic {config.get('vocab_size')}".encode()]
    elif gguf := linked_gguf(folder):
        tensors = list(_of_gguf(gguf))
    else:
        tensors = [tensor for path in weight_files(folder) for tensor in _of_safetensors(path)]
    digest = hashlib.sha256()
    for tensor in sorted(tensors):
        digest.update(len(tensor).to_bytes(8, "little") + tensor)
    return digest.hexdigest()


def _of_gguf(path: Path) -> Iterator[bytes]:
    from .gguf_file import open_gguf  # only now: an engine without weights needs no NumPy

    file = open_gguf(path)
    for tensor in file.tensors.values():
        data = tensor.data.reshape(-1)
        pieces = (data[start : start + PIECE_BYTES].tobytes() for start in _starts(data.size))
        yield _described(tensor.name, tensor.kind, tensor.shape) + b"".join(pieces)
        file.mapped.release(data)


def _of_safetensors(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            for entry in header_of(path):
                described = [_described(entry.name, entry.dtype, entry.shape)]
                for start in _starts(entry.num_bytes):
                    file.seek(entry.start + start)
                    described.append(file.read(min(PIECE_BYTES, entry.num_bytes)))
                yield b"".join(described)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing, truncated or corrupt: {quoted(error)}") from error


def _described(name: str, kind: str, shape: tuple[int, ...]) -> bytes:
    return repr((name, kind, shape)).encode()


def _starts(num_bytes: int) -> Iterator[int]:
    """Where the pieces of a tensor begin."""
    last = max(0, num_bytes - PIECE_BYTES)
    return (last * at // (PIECES - 1) for at in range(PIECES))
