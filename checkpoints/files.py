"""Files that are whole or absent, whatever happens to the process or the machine, and the manifest of a folder of them.

The manifest lists a published folder's files with sizes, compared at each start, and checksums, compared on demand.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .folder import CheckpointError
from .progress import Progress, no_progress

PIECE_BYTES = 1 << 22
MANIFEST = "manifest.json"
# Increased whenever an import would produce something else: folders of an older format are imported again.
FORMAT = 5


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `target` when the block succeeds and is removed if it fails.

    A process killed meanwhile leaves it behind as TARGET.….partial.
    """
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(target)
        sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Force a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """The hexadecimal SHA-256 of a file; `on_bytes` is called with the number of bytes read so far."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            if on_bytes:
                on_bytes(file.tell())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class FileRecord:
    name: str
    size_bytes: int
    sha256: str


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system has one name for a file."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def seal(folder: Path, progress: Progress = no_progress, known: Mapping[str, str] | None = None) -> None:
    """Write the manifest of a finished folder and force everything in the folder to the disk.

    known  SHA-256 of files that need not be read again, by their paths in the folder
    """
    digests = dict(known or {})
    inside = sorted(folder.rglob("*"))
    unread = [name for path in inside if path.is_file() and (name := str(path.relative_to(folder))) not in digests]
    digests |= _checksums(folder, unread, "Checksumming", progress)
    records: dict[str, dict[str, object]] = {}
    for name, digest in sorted(digests.items()):
        records[name] = {"bytes": (folder / name).stat().st_size, "sha256": digest}
        if not (folder / name).is_symlink():
            sync(folder / name)
    for path in inside:
        if path.is_dir():
            sync(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": records}, indent=2) + "\n")
    sync(manifest)
    sync(folder)


def read_manifest(folder: Path) -> list[FileRecord] | None:
    """The manifest's entries; None if it is missing, unreadable or of another format."""
    try:
        document = json.loads((folder / MANIFEST).read_text())
        if document["format"] != FORMAT:
            return None
        return [FileRecord(name, entry["bytes"], entry["sha256"]) for name, entry in document["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_intact(folder: Path) -> bool:
    """Whether every file that the manifest lists exists and has its size. Contents are not read."""
    records = read_manifest(folder)
    try:
        return records is not None and all((folder / r.name).stat().st_size == r.size_bytes for r in records)
    except OSError:
        return False


def verify(folder: Path, progress: Progress = no_progress) -> None:
    """Read every file of a published folder and compare its checksum.

    Raises CheckpointError, which names the first file that is missing or differs.
    """
    records = read_manifest(folder)
    if records is None:
        raise CheckpointError(f"{folder} has no manifest, so it cannot be verified")
    for record in records:
        path = folder / record.name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if (size_bytes := path.stat().st_size) != record.size_bytes:
            raise CheckpointError(f"{path} has {size_bytes} bytes, not {record.size_bytes}")
    expected = {record.name: record.sha256 for record in records}
    for name, digest in _checksums(folder, expected, "Verifying", progress):
        if digest != expected[name]:
            raise CheckpointError(f"{folder / name} has SHA-256 {digest}, not {expected[name]}")


def _checksums(folder: Path, names: Collection[str], verb: str, progress: Progress) -> Iterator[tuple[str, str]]:
    sizes = {name: (folder / name).stat().st_size for name in names}
    before, total = 0, sum(sizes.values())
    for name, size_bytes in sizes.items():
        yield name, sha256_of(folder / name, partial(_report, progress, verb, before, total))
        before += size_bytes


def _report(progress: Progress, verb: str, before: int, total: int, done: int) -> None:
    progress(verb, before + done, total)
