"""Names of models: finds the folder for any name that a user may give, and lists the models available by name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from . import default_model, synthetic
from .cache import Cache
from .files import MANIFEST, read_manifest
from .folder import CheckpointError, check_folder, obtain_hub_model, read_json_object
from .gguf_import import obtain_gguf_model
from .progress import Progress, no_progress

DEFAULT_MODEL = default_model.NAME
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_LONGEST_SHOWN = 200


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's name and folder.

    name    as the user gave it; for a path, the folder's own name; for a .gguf file, its name without .gguf
    folder  holds config.json, tokenizer.json and, except for the synthetic model, safetensors weights
    """

    name: str
    folder: Path


def resolve(model: str, progress: Progress | None = None) -> Path:
    """The folder that `find_model` finds."""
    return find_model(model, progress).folder


def find_model(model: str, progress: Progress | None = None) -> FoundModel:
    """Find a model's Hugging Face folder, importing the model first if necessary.

    model   the default model's name, "synthetic", the name of an imported model, a folder, a .gguf file, or a name on
            the Hugging Face Hub ("org/name")

    Raises CheckpointError if there is no such model, or if it is broken, unsupported or cannot be fetched.
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
        return FoundModel(path.stem if path.stem.isprintable() else folder.name, folder)
    if model in cache.published_names():
        return FoundModel(model, cache.root / "models" / model)
    if _HUB_NAME.fullmatch(model):
        return FoundModel(model, obtain_hub_model(model))
    raise CheckpointError(
        f"there is no model {_shortened(model)}: give {DEFAULT_MODEL}, {synthetic.NAME}, a folder with config.json, "
        "a .gguf file, or a name on the Hugging Face Hub such as org/name"
    )


def _shortened(model: str) -> str:
    return repr(model if len(model) <= _LONGEST_SHOWN else f"{model[:_LONGEST_SHOWN]}…")


@dataclass(frozen=True, slots=True)
class AvailableModel:
    """A model available by name; `folder` and `size_bytes` (of its files) are None if its first use will import it."""

    name: str
    family: str
    folder: Path | None
    size_bytes: int | None


def list_models() -> list[AvailableModel]:
    """The models that can be served by name: the default model, the synthetic model, and those in the cache."""
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
