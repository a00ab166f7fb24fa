"""From what a user calls a model to its folder, and the list of what can be called."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pagoda_server.checkpoints import default_model, synthetic
from pagoda_server.checkpoints.cache import Cache
from pagoda_server.checkpoints.errors import CheckpointError
from pagoda_server.checkpoints.gguf_import import obtain_gguf_model
from pagoda_server.checkpoints.hub import obtain_hub_model
from pagoda_server.checkpoints.json_file import read_json_object
from pagoda_server.checkpoints.local import check_folder
from pagoda_server.checkpoints.manifest import MANIFEST, read_manifest
from pagoda_server.checkpoints.progress import Progress, no_progress

DEFAULT_MODEL = default_model.NAME
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_LONGEST_TOLD = 200


@dataclass(frozen=True, slots=True)
class FoundModel:
    """
    name    what was asked for, but a folder's own name where that was asked for by its path, or made of a .gguf file
    folder  with config.json, tokenizer.json and, but for the synthetic model, safetensors weights
    """

    name: str
    folder: Path


def resolve(model: str, progress: Progress | None = None) -> Path:
    """The Hugging Face folder of a model, as `find_model` has it."""
    return find_model(model, progress).folder


def find_model(model: str, progress: Progress | None = None) -> FoundModel:
    """The Hugging Face folder of a model, imported first where that is needed.

    model   the default model's name, "synthetic", the name of an imported model, a folder, a .gguf file, or a name on
            the Hugging Face Hub ("org/name")

    Raises CheckpointError if there is no such model, or it is broken, unsupported or cannot be fetched.
    """
    try:
        return _find(model, Cache.default(), progress or no_progress)
    except OSError as error:
        raise CheckpointError(f"{_shortened(model)} cannot be read: {error.strerror or error}") from error


def _find(model: str, cache: Cache, progress: Progress) -> FoundModel:
    if model == default_model.NAME:
        return FoundModel(model, default_model.obtain_default_model(cache, progress))
    if model == synthetic.NAME:
        return FoundModel(model, synthetic.obtain_synthetic_model(cache, progress))
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return FoundModel(os.path.basename(os.path.abspath(path)), check_folder(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is neither a folder nor a .gguf file")
        folder = obtain_gguf_model(path, cache, progress)
        return FoundModel(folder.name, folder)
    if model in cache.published_names():
        return FoundModel(model, cache.root / "models" / model)
    if _HUB_NAME.fullmatch(model):
        return FoundModel(model, obtain_hub_model(model))
    raise CheckpointError(
        f"there is no model {_shortened(model)}: give {DEFAULT_MODEL}, {synthetic.NAME}, a folder with config.json, "
        "a .gguf file, or a name on the Hugging Face Hub such as org/name"
    )


def _shortened(model: str) -> str:
    return repr(model if len(model) <= _LONGEST_TOLD else f"{model[:_LONGEST_TOLD]}…")


@dataclass(frozen=True, slots=True)
class AvailableModel:
    """folder and size_bytes (of its files) are None for a model that its first use will import."""

    name: str
    family: str
    folder: Path | None
    size_bytes: int | None


def list_models() -> list[AvailableModel]:
    """What can be served by name: the default and the synthetic model, and whatever the cache holds."""
    cache = Cache.default()
    families = {default_model.NAME: default_model.FAMILY, synthetic.NAME: synthetic.FAMILY}
    names = [*families, *(name for name in cache.published_names() if name not in families)]
    return [_describe(name, families.get(name, ""), cache) for name in names]


def _describe(name: str, family: str, cache: Cache) -> AvailableModel:
    folder = cache.published(name)
    if folder is None:
        return AvailableModel(name, family, None, None)
    records = read_manifest(folder) or []
    size_bytes = sum(record.size_bytes for record in records) + (folder / MANIFEST).stat().st_size
    return AvailableModel(name, str(read_json_object(folder / "config.json")["model_type"]), folder, size_bytes)
