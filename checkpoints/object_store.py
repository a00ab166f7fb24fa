"""Models in an object store, or wherever else a URL leads that fsspec knows: s3://…, gs://…, https://…, file://….

The folder there holds a file SHA256SUMS, as `sha256sum * > SHA256SUMS` writes it. Only what it lists is fetched, and
every file is compared with it. A model is imported once for each content of that file, so one that has changed there is
fetched anew. While the store does not answer, what was fetched last under the URL is used.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .cache import Cache
from .files import MANIFEST, PIECE_BYTES, link_or_copy, sync, written_whole
from .folder import CheckpointError, check_folder, quoted
from .progress import Progress

SUMS = "SHA256SUMS"
MAX_SUMS_BYTES = 1 << 20
MAX_FILES = 4096
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([\w][\w.-]{0,254})", re.ASCII)


def is_url(model: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*://.", model) is not None


def obtain_stored_folder(url: str, cache: Cache, progress: Progress) -> Path:
    """The folder of the model at a URL, fetched into the cache unless it is there. Raises CheckpointError."""
    record = cache.root / "urls" / hashlib.sha256(url.encode()).hexdigest()
    try:
        store, path = _open(url)
        with store.open(f"{path}/{SUMS}", "rb") as file:
            content: bytes = file.read(MAX_SUMS_BYTES + 1)
    except Exception as error:  # each store has errors of its own
        if (known := _known(record, cache)) is not None:
            return known
        reason = str(error).strip() or type(error).__name__
        raise CheckpointError(f"{url} has no {SUMS} that can be read: {quoted(reason)}") from error
    sums = _parse(url, content)
    stem = re.sub(r"[^\w.-]", "-", path.rsplit("/", 1)[-1], flags=re.ASCII).lstrip(".-")[:64] or "model"
    name = f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}"
    folder = cache.obtain(name, partial(_fetch, store, path, sums, progress), progress)
    record.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(record) as unfinished:
        unfinished.write_text(name)
    return check_folder(folder)


def _open(url: str) -> tuple[Any, str]:
    """The store, and the folder's path in it. Raises ImportError, which names the package that the store needs."""
    from fsspec.core import url_to_fs  # only now: few models come this way

    store, path = url_to_fs(url)
    return store, str(path).rstrip("/")


def _known(record: Path, cache: Cache) -> Path | None:
    try:
        return cache.published(record.read_text())
    except OSError:
        return None


def _parse(url: str, content: bytes) -> dict[str, str]:
    """The SHA-256 of each file by its name. Raises CheckpointError, which names the line."""
    if len(content) > MAX_SUMS_BYTES:
        raise CheckpointError(f"{url}/{SUMS} has more than {MAX_SUMS_BYTES} bytes")
    sums: dict[str, str] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in sums or match[2] == MANIFEST:
            raise CheckpointError(
                f"{url}/{SUMS}, line {number}: must be a SHA-256 and the name of a file, each file once, "
                f"not {quoted(line[:200])}"
            )
        if match[2] != SUMS:  # itself, as a second run of `sha256sum *` lists it
            sums[match[2]] = match[1]
    if not 0 < len(sums) <= MAX_FILES:
        raise CheckpointError(f"{url}/{SUMS} lists {len(sums)} files; from 1 to {MAX_FILES} are allowed")
    return sums


def _fetch(
    store: Any, path: str, sums: Mapping[str, str], progress: Progress, work: Path, draft: Path
) -> Mapping[str, str]:
    """Fetch every file that is not in `work` from an earlier try, and give it its name in `draft`."""
    try:
        sizes = {name: int(store.size(f"{path}/{name}") or 0) for name in sums}
        done, total = 0, sum(sizes.values())
        for name, digest in sums.items():
            if not (fetched := work / digest).exists():
                _fetch_file(store, f"{path}/{name}", fetched, digest, partial(_report, progress, name, done, total))
            done += sizes[name]
            link_or_copy(fetched, draft / name)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        reason = quoted(str(error).strip() or type(error).__name__)
        raise CheckpointError(f"{path} cannot be fetched: {reason}") from error
    return sums


def _fetch_file(store: Any, path: str, target: Path, digest: str, report: Any) -> None:
    found, length = hashlib.sha256(), 0
    with written_whole(target) as unfinished:
        with store.open(path, "rb") as source, unfinished.open("wb") as file:
            while piece := source.read(PIECE_BYTES):
                found.update(piece)
                file.write(piece)
                length += len(piece)
                report(length)
        sync(unfinished)
        if found.hexdigest() != digest:
            raise CheckpointError(f"{path} has SHA-256 {found.hexdigest()}, not {digest} as {SUMS} says")


def _report(progress: Progress, name: str, before: int, total: int, done: int) -> None:
    progress(f"Fetching {name}", before + done, total)
