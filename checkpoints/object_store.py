"""Models in an object store, or wherever else a URL leads that fsspec knows: s3://…, gs://…, https://…, file://….

The URL is that of a folder, or of a .gguf file. The folder, or the one in which the file lies, holds a file SHA256SUMS,
as sha256sum writes it. Only what it lists is fetched, and every file is compared with it. A folder is fetched once for
each content of that list, and a .gguf file once for each sum. While the store does not answer, what was fetched last
under the URL is used.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from .cache import Build, Cache
from .files import MANIFEST, PIECE_BYTES, link_or_copy, sync, written_whole
from .folder import GGUF, MAX_JSON_BYTES, CheckpointError, check_folder, quoted
from .gguf_import import import_gguf
from .progress import Progress

SUMS = "SHA256SUMS"
MAX_SUMS_BYTES = 1 << 20
MAX_FILES = 4096
MAX_UNSIZED_BYTES = MAX_JSON_BYTES  # of a file whose size the store does not say
_NAME = r"\w[\w.-]{0,254}"  # no part of a path begins with a dot, so that none leads out of the folder
_LINE = re.compile(rf"([0-9a-f]{{64}}) [ *](?:\./)?((?:{_NAME}/){{0,3}}{_NAME})", re.ASCII)


def is_url(model: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*://.", model) is not None


def name_in(url: str) -> str:
    """What the model at a URL is called: its folder's name, or its file's without .gguf."""
    return url.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def obtain_stored_model(url: str, cache: Cache, progress: Progress) -> Path:
    """The folder of the model at a URL, fetched into the cache unless it is there. Raises CheckpointError."""
    url = url.rstrip("/")
    folder_url, _, file_name = url.rpartition("/") if url.endswith(".gguf") else (url, "", "")
    record = cache.root / "urls" / hashlib.sha256(url.encode()).hexdigest()
    try:
        store, path = _open(folder_url)
        with store.open(f"{path}/{SUMS}", "rb") as file:
            content: bytes = file.read(MAX_SUMS_BYTES + 1)
    except Exception as error:  # each store has errors of its own
        if (known := _known(record, cache)) is not None:
            return known
        reason = str(error).strip() or type(error).__name__
        raise CheckpointError(f"{folder_url} has no {SUMS} that can be read: {quoted(reason)}") from error
    sums = _parse(folder_url, content)
    build: Build
    if file_name:
        if file_name not in sums:
            raise CheckpointError(f"{folder_url}/{SUMS} does not list {quoted(file_name)}")
        key = sums[file_name]
        build = partial(_build_gguf, store, path, {file_name: key}, progress)
    else:
        if "config.json" not in sums:
            files = ", ".join(name for name in sums if name.endswith(".gguf"))
            offer = f"; it lists {quoted(files)}: give the URL of one" if files else ""
            raise CheckpointError(f"{folder_url}/{SUMS} lists no config.json, as a model's folder has{offer}")
        key = hashlib.sha256(content).hexdigest()
        build = partial(_build_folder, store, path, sums, progress)
    stem = re.sub(r"[^\w.-]", "-", name_in(url), flags=re.ASCII).lstrip(".-")[:64] or "model"
    name = f"{stem}-{key[:16]}"
    folder = cache.obtain(name, build, progress)
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
                f"{url}/{SUMS}, line {number}: must be a SHA-256 and the path of a file, each file once and in at most "
                f"3 folders, not {quoted(line[:200])}"
            )
        if match[2] != SUMS:  # itself, as a second run of `sha256sum *` lists it
            sums[match[2]] = match[1]
    if not 0 < len(sums) <= MAX_FILES:
        raise CheckpointError(f"{url}/{SUMS} lists {len(sums)} files; from 1 to {MAX_FILES} are allowed")
    for name in sums:
        if both := next((str(each) for each in PurePosixPath(name).parents if str(each) in sums), None):
            raise CheckpointError(f"{url}/{SUMS} lists {both} as a file and as a folder")
    return sums


def _build_folder(
    store: Any, path: str, sums: Mapping[str, str], progress: Progress, work: Path, draft: Path
) -> Mapping[str, str]:
    for name, fetched in _fetch(store, path, sums, progress, work).items():
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(fetched, draft / name)
    return sums


def _build_gguf(
    store: Any, path: str, sums: Mapping[str, str], progress: Progress, work: Path, draft: Path
) -> Mapping[str, str]:
    ((name, digest),) = sums.items()
    fetched = _fetch(store, path, sums, progress, work)[name]
    named = work / name  # which errors mention
    named.unlink(missing_ok=True)
    link_or_copy(fetched, named)
    import_gguf(named, draft, progress)
    link_or_copy(fetched, draft / GGUF)
    return {GGUF: digest}


def _fetch(store: Any, path: str, sums: Mapping[str, str], progress: Progress, work: Path) -> dict[str, Path]:
    """Fetch every file that is not in `work` from an earlier try. Return where each is, by its name."""
    found = {name: work / digest for name, digest in sums.items()}
    try:
        sizes = {name: _size(store, f"{path}/{name}") for name in sums}
        missing = sum(sizes[name] for name, fetched in found.items() if not fetched.exists())
        if missing > (free := shutil.disk_usage(work).free):
            raise CheckpointError(f"{path} needs {missing} bytes; the disk of {work.parent} has {free} left")
        done, total = 0, sum(sizes.values())
        for name, fetched in found.items():
            if not fetched.exists():
                report = partial(_report, progress, name, done, total)
                _fetch_file(store, f"{path}/{name}", fetched, sums[name], sizes[name], report)
            done += sizes[name]
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        reason = quoted(str(error).strip() or type(error).__name__)
        raise CheckpointError(f"{path} cannot be fetched: {reason}") from error
    return found


def _size(store: Any, path: str) -> int:
    """The size of a file, or the most that is read of one whose size the store does not say."""
    size = store.size(path)
    return MAX_UNSIZED_BYTES if size is None else int(size)


def _fetch_file(
    store: Any, path: str, target: Path, digest: str, most_bytes: int, report: Callable[[int], None]
) -> None:
    found, length = hashlib.sha256(), 0
    with written_whole(target) as unfinished:
        with store.open(path, "rb") as source, unfinished.open("wb") as file:
            while piece := source.read(PIECE_BYTES):
                length += len(piece)
                if length > most_bytes:
                    raise CheckpointError(f"{path} has more than {most_bytes} bytes, the size that its store says")
                found.update(piece)
                file.write(piece)
                report(length)
        sync(unfinished)
        if found.hexdigest() != digest:
            raise CheckpointError(f"{path} has SHA-256 {found.hexdigest()}, not {digest} as {SUMS} says")


def _report(progress: Progress, name: str, before: int, total: int, done: int) -> None:
    progress(f"Fetching {name}", before + done, total)
