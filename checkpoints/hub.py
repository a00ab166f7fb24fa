"""Models of the Hugging Face Hub: downloads show progress, resume, are verified, and count only when they are whole.

hub/models--ORG--NAME/   blobs/ID          a verified file; ID.incomplete is one that the next try goes on with
                         snapshots/REVISION  links to the files of a model, all of them
hub/names/               what each name that was asked for stands for

The Hub's own library downloads a broken file anew in the next process, so only its requests are used here. A model
that other programs have in the library's cache is used there instead.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .cache import Cache
from .files import PIECE_BYTES, remove_tree, sync, written_whole
from .folder import CheckpointError, check_folder, quoted, read_json_object, write_json
from .progress import Progress

LOCK = "hub"
FOLDER_SUFFIXES = (".json", ".safetensors", ".jinja")
PREFERRED_QUANTIZATIONS = ("Q4_K_M", "Q4_0", "Q8_0")
_OF_FOLDER = re.compile(r"[^/]+|\d+_Pooling/config\.json")  # the pooling of an embedding model
_NAME = re.compile(r"(?:(?:hf\.co|huggingface\.co)/)?([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+))?")


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name`, as the Hub has it, and the quantization of a GGUF file there: org/name:Q4_K_M."""

    repository: str
    quantization: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        found = _NAME.fullmatch(text)
        return cls(found[1], found[2]) if found else None

    def __str__(self) -> str:
        return self.repository + (f":{self.quantization}" if self.quantization else "")


@dataclass(frozen=True, slots=True)
class HubModel:
    """What was downloaded under a name: a folder, or a .gguf file, at a revision of the repository."""

    name: str
    revision: str
    path: Path


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    name: str
    size_bytes: int
    id: str  # SHA-256 of a file in LFS, else its git object's SHA-1


def obtain_hub_model(name: HubName, cache: Cache, progress: Progress, refreshes: bool = False) -> Path:
    """Return the model's folder or .gguf file. One that was downloaded needs no network.

    refreshes  ask the Hub for a newer revision

    Raises CheckpointError if the network, the repository or access to it is missing, or if the repository's files are
    not supported or differ from what the Hub says about them.
    """
    known = downloaded(name, cache)
    if known and not refreshes:
        return known.path
    try:
        if shared := _in_shared_cache(name):
            found = HubModel(str(name), shared.name, shared)
        else:
            with cache.locked(f"{LOCK}-{_folder_name(name)}", progress):
                found = _fetch(name, cache, progress)
    except CheckpointError:
        raise
    except Exception as error:  # from the Hub's own classes, its HTTP library or the operating system
        if known:  # without the Hub, what is here has to do
            return known.path
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name} is not a folder here, and the Hugging Face Hub did not provide it: {quoted(reason)}"
        ) from error
    record = _record(name, cache)
    record.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(record) as unfinished:
        write_json(unfinished, asdict(found) | {"path": str(found.path)})
    return found.path


def _fetch(name: HubName, cache: Cache, progress: Progress) -> HubModel:
    from huggingface_hub import HfApi

    info = HfApi().model_info(name.repository, files_metadata=True)
    files = _chosen(name, info)
    storage = _storage(name, cache)
    snapshot = storage / "snapshots" / str(info.sha)
    (storage / "blobs").mkdir(parents=True, exist_ok=True)
    before, total = 0, sum(file.size_bytes for file in files)
    for file in files:
        _download(name, str(info.sha), file, storage / "blobs", partial(_report, progress, name, before, total))
        before += file.size_bytes
    snapshot.mkdir(parents=True, exist_ok=True)
    for file in files:
        link = snapshot / file.name
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(storage / "blobs" / file.id)
    is_file = files[0].name.endswith(".gguf")
    return HubModel(str(name), str(info.sha), snapshot / files[0].name if is_file else check_folder(snapshot))


def _report(progress: Progress, name: HubName, before: int, total: int, done: int) -> None:
    progress(f"Downloading {name}", before + done, total)


class _Reporting(io.FileIO):
    """A file that says how long it is whenever it grows."""

    def __init__(self, path: Path, report: Callable[[int], None]) -> None:
        super().__init__(path, "a+b")
        self._report = report

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._report(self.tell())
        return written


def _download(name: HubName, revision: str, file: _RemoteFile, blobs: Path, report: Callable[[int], None]) -> None:
    """Download a file, or what is missing of it, and compare its size and checksum."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
    from huggingface_hub.utils.tqdm import disable_progress_bars

    target, incomplete = blobs / file.id, blobs / f"{file.id}.incomplete"
    if target.is_file():
        report(file.size_bytes)
        return
    disable_progress_bars()
    url = hf_hub_url(name.repository, file.name, revision=revision)
    report(0)
    with _Reporting(incomplete, report) as partly:
        partly.seek(0, io.SEEK_END)
        if partly.tell() < file.size_bytes:
            headers = build_hf_headers()
            http_get(url, partly, resume_size=partly.tell(), headers=headers, expected_size=file.size_bytes)
    if incomplete.stat().st_size != file.size_bytes or _id_of(incomplete, file) != file.id:
        incomplete.unlink()
        raise CheckpointError(f"{file.name} was not downloaded as the Hub describes it: start again to get it anew")
    sync(incomplete)
    incomplete.rename(target)
    report(file.size_bytes)


def _id_of(path: Path, file: _RemoteFile) -> str:
    is_lfs = len(file.id) == 64
    digest = hashlib.sha256() if is_lfs else hashlib.sha1(f"blob {file.size_bytes}\0".encode())
    with path.open("rb") as content:
        while piece := content.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def downloaded(name: HubName, cache: Cache) -> HubModel | None:
    """What was downloaded under this name, if it is still there."""
    return _read(_record(name, cache))


def all_downloaded(cache: Cache) -> list[HubModel]:
    records = sorted((cache.root / "hub" / "names").glob("*.json"))
    return [found for record in records if (found := _read(record))]


def remove_hub_model(model: HubModel, cache: Cache) -> None:
    """Forget the model, and delete its files unless they are in the Hub's own cache or another name needs them."""
    name = HubName.parse(model.name)
    assert name
    _record(name, cache).unlink(missing_ok=True)
    storage = _storage(name, cache)
    is_needed = any(storage in other.path.parents for other in all_downloaded(cache))
    if storage in model.path.parents and not is_needed:
        remove_tree(storage)


def _record(name: HubName, cache: Cache) -> Path:
    return cache.root / "hub" / "names" / f"{str(name).replace('/', '--')}.json"


def _read(record: Path) -> HubModel | None:
    try:
        fields = read_json_object(record)
        found = HubModel(str(fields["name"]), str(fields["revision"]), Path(str(fields["path"])))
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return found if found.path.exists() and HubName.parse(found.name) else None


def _storage(name: HubName, cache: Cache) -> Path:
    return cache.root / "hub" / _folder_name(name)


def _folder_name(name: HubName) -> str:
    return f"models--{name.repository.replace('/', '--')}"


def _in_shared_cache(name: HubName) -> Path | None:
    """The snapshot of this folder in the cache that other programs use too, completed there if the Hub answers."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    config = None if name.quantization else try_to_load_from_cache(name.repository, "config.json")
    if not isinstance(config, str):
        return None
    try:
        patterns = [f"*{suffix}" for suffix in FOLDER_SUFFIXES]
        return check_folder(Path(snapshot_download(name.repository, allow_patterns=patterns)))
    except Exception:  # the library has a class for each way in which the Hub does not answer
        with suppress(CheckpointError):  # it is not complete, and is downloaded here
            return check_folder(Path(config).parent)
    return None


def _chosen(name: HubName, info: Any) -> list[_RemoteFile]:
    """The files to download: a folder's, or one .gguf file."""
    files = [
        _RemoteFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else str(each.blob_id))
        for each in info.siblings
        if not Path(each.rfilename).is_absolute() and ".." not in Path(each.rfilename).parts
    ]
    if not all(re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", file.id) for file in files):
        raise CheckpointError(f"the Hub names no checksum of a file of {name.repository}")
    quantized = {}
    for file in files:
        if file.name.endswith(".gguf") and not re.search(r"mmproj|-\d{5}-of-\d{5}", file.name):
            stem = Path(file.name).stem
            quantized[(re.findall(r"(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*)$", stem.upper()) or [stem])[0]] = file
    has_folder = any(file.name.endswith(".safetensors") for file in files)
    if name.quantization or (quantized and not has_folder):
        wanted = [name.quantization.upper()] if name.quantization else [*PREFERRED_QUANTIZATIONS, *quantized]
        for each in wanted:
            if each in quantized:
                return [quantized[each]]
        names = ", ".join(sorted(quantized)) or "no .gguf file that is whole"
        raise CheckpointError(f"{name.repository} has no GGUF file in {name.quantization}; it has {names}")
    chosen = [file for file in files if _OF_FOLDER.fullmatch(file.name) and Path(file.name).suffix in FOLDER_SUFFIXES]
    if not chosen:
        raise CheckpointError(f"{name.repository} has neither safetensors weights nor a .gguf file")
    return chosen
