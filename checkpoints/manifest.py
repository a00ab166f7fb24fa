"""The list of a published folder's files with sizes and checksums: cheap to check at each start, fully on demand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pagoda_server.checkpoints.errors import CheckpointError
from pagoda_server.checkpoints.files import sha256_of, sync
from pagoda_server.checkpoints.progress import Progress, no_progress

MANIFEST = "manifest.json"
# Raised whenever an import would come out differently: folders of an older format are imported again.
FORMAT = 2


@dataclass(frozen=True, slots=True)
class FileRecord:
    name: str
    size_bytes: int
    sha256: str


def seal(folder: Path, progress: Progress = no_progress) -> None:
    """Writes the manifest of a finished folder and forces everything in it to the disk."""
    records: dict[str, dict[str, object]] = {}
    for path, digest in _checksums(sorted(folder.iterdir()), "Checksumming", progress):
        records[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
        sync(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": records}, indent=2) + "\n")
    sync(manifest)
    sync(folder)


def read_manifest(folder: Path) -> list[FileRecord] | None:
    """None where there is no manifest, or one of another format, or one that cannot be read."""
    try:
        document = json.loads((folder / MANIFEST).read_text())
        if document["format"] != FORMAT:
            return None
        return [FileRecord(name, entry["bytes"], entry["sha256"]) for name, entry in document["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_intact(folder: Path) -> bool:
    """Every file that the manifest lists is there and has its size. Contents are not read."""
    records = read_manifest(folder)
    try:
        return records is not None and all((folder / r.name).stat().st_size == r.size_bytes for r in records)
    except OSError:
        return False


def verify(folder: Path, progress: Progress = no_progress) -> None:
    """Reads every file of a published folder and compares its checksum.

    Raises CheckpointError that names the first file which is missing or differs.
    """
    records = read_manifest(folder)
    if records is None:
        raise CheckpointError(f"{folder} has no manifest to verify it by")
    for record in records:
        path = folder / record.name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if (size_bytes := path.stat().st_size) != record.size_bytes:
            raise CheckpointError(f"{path} has {size_bytes} bytes, not {record.size_bytes}")
    expected = {record.name: record.sha256 for record in records}
    for path, digest in _checksums([folder / name for name in expected], "Verifying", progress):
        if digest != expected[path.name]:
            raise CheckpointError(f"{path} has SHA-256 {digest}, not {expected[path.name]}")


def _checksums(paths: list[Path], verb: str, progress: Progress) -> Iterator[tuple[Path, str]]:
    total = sum(path.stat().st_size for path in paths)
    before = 0
    for path in paths:
        yield path, sha256_of(path, partial(_report, progress, verb, before, total))
        before += path.stat().st_size


def _report(progress: Progress, verb: str, before: int, total: int, done: int) -> None:
    progress(verb, before + done, total)
