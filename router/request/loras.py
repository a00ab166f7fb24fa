"""What operators do with LoRA adapters: load, unload and list them. Nothing outside --lora-dir can be loaded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

from pagoda.v1 import admin_pb2, control_pb2

from ...settings.request import MAX_ADAPTER_NAME, MAX_ADAPTER_PATH
from ..errors import AlreadyExists, InvalidArgument, NotFound, PagodaError, Unavailable
from ..tenants.caller import Right, caller
from .models import ServedModel, ServedModels

_FILES = ("adapter_config.json", "adapter_model.safetensors")  # of a folder of PEFT; engines read these


class Loras:
    """The adapters of all models, as operators see and change them.

    folder  --lora-dir; None: none can be loaded while the server runs
    """

    def __init__(self, models: ServedModels, folder: Path | None) -> None:
        self._models = models
        self._folder = folder
        self._loading: list[tuple[str, ServedModel]] = []  # names that are being loaded, with their models

    async def load(self, request: admin_pb2.LoadLoraRequest) -> control_pb2.LoraAdapter:
        """Load an adapter on every engine of its model.

        Raises InvalidArgument, NotFound, AlreadyExists, and what `Adapters.load` raises.
        """
        name, model = request.lora_name, self._models.named(request.model).model
        self._check_free(name, model)
        self._loading.append((name, model))
        try:
            path = await asyncio.to_thread(confined, self._folder, request.lora_path)
            await model.adapters.load(name, path, is_pinned=request.pinned, replaces=request.replace)
        finally:
            self._loading.remove((name, model))
        return described(model, name)

    async def unload(self, name: str) -> None:
        """Unload an adapter from every engine. Raises InvalidArgument, and what `Adapters.unload` raises."""
        _check_name(name)
        refusals: list[PagodaError] = []
        for model in [each for each in self._models if name in each.adapters] or list(self._models):
            try:
                await model.adapters.unload(name)
                return
            except (NotFound, Unavailable) as error:
                refusals.append(error)
        raise max(refusals, key=lambda each: isinstance(each, Unavailable))  # engines that are away may hold it

    def all(self) -> Iterator[control_pb2.LoraAdapter]:
        for model in self._models:
            yield from adapters_of(model)

    def _check_free(self, name: str, model: ServedModel) -> None:
        _check_name(name)
        for each in self._models:
            if each.is_called(name):
                raise InvalidArgument("lora_name", "is the name of a served model")
            if each is not model and (name in each.adapters or (name, each) in self._loading):
                raise AlreadyExists("lora_name: an adapter of another model has this name")


def _check_name(name: str) -> None:
    if not name:
        raise InvalidArgument("lora_name", "is empty")
    if len(name) > MAX_ADAPTER_NAME:
        raise InvalidArgument("lora_name", f"has {len(name)} characters, at most {MAX_ADAPTER_NAME}")
    if not name.isprintable():
        raise InvalidArgument("lora_name", "holds characters that are not printable")


def adapters_of(model: ServedModel) -> Iterator[control_pb2.LoraAdapter]:
    """The adapters of a model that the caller may name."""
    return (described(model, name) for name in model.adapters.names if caller().may_name(name))


def described(model: ServedModel, name: str) -> control_pb2.LoraAdapter:
    adapters = model.adapters
    known, engines, observes = adapters.known.get(name), adapters.holders(name), caller().may(Right.OBSERVE)
    info = control_pb2.LoraAdapter(name=name, model=model.name, ready=bool(engines))
    if known is not None:
        info.identity, info.rank = known.identity.hex(), known.rank
        info.num_bytes, info.pinned = known.num_bytes, known.is_pinned
    if observes:
        info.engines.extend(engine.name for engine in engines)
        info.fault = adapters.fault(name)
    return info


def confined(folder: Path | None, given: str) -> str:
    """The path that a client means in the folder, without symbolic links. It may block.

    Raises InvalidArgument for one that leads out of the folder, NotFound if nothing is there.
    """
    if folder is None:
        raise InvalidArgument("lora_path", "names nothing: the server was started without --lora-dir")
    if not given:
        raise InvalidArgument("lora_path", "is empty")
    if len(given) > MAX_ADAPTER_PATH or not given.isprintable():
        raise InvalidArgument("lora_path", f"must have at most {MAX_ADAPTER_PATH} printable characters")
    leads_out = InvalidArgument("lora_path", "leads out of --lora-dir")
    root = Path(os.path.abspath(folder))
    meant = Path(os.path.normpath(root / given))
    if not meant.is_relative_to(root):  # before anything out there is looked at
        raise leads_out
    try:
        root, path = root.resolve(strict=True), meant.resolve(strict=True)
        files = [(path / name).resolve() for name in _FILES] if path.is_dir() else []
    except (OSError, RuntimeError):  # the second one: links in a circle
        raise NotFound("lora_path: nothing is there in --lora-dir") from None
    if not all(each.is_relative_to(root) for each in (path, *files)):
        raise leads_out
    if not str(path).isprintable():  # a link may lead to a name that is not even text
        raise InvalidArgument("lora_path", "leads to a name with characters that are not printable")
    return str(path)
