"""Files that are either whole or absent, whatever happens to the process or the machine meanwhile."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PIECE_BYTES = 1 << 22


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """A path to write to, the caller's alone, which becomes `target` when the block succeeds and vanishes if it fails.

    A process killed meanwhile leaves it behind, as TARGET.….partial.
    """
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        sync(partial)
        partial.replace(target)
        sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Forces a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """The hexadecimal SHA-256 of a file; `on_bytes` hears how many bytes have been read so far."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            if on_bytes:
                on_bytes(file.tell())
    return digest.hexdigest()
