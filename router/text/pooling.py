"""How an embedding model makes a vector of a text, as files of Sentence Transformers or a GGUF file say."""

from __future__ import annotations

from pathlib import Path

from pagoda.v1 import inference_pb2

from ...checkpoints.folder import Json, quoted, read_json, read_json_object
from ...checkpoints.gguf_import import read_origin
from ..errors import ConfigError

_POOLINGS = {
    "cls_token": inference_pb2.POOLING_CLS,
    "mean_tokens": inference_pb2.POOLING_MEAN,
    "lasttoken": inference_pb2.POOLING_LAST,
}
# In `pooling_mode`, which newer files have, and in what the import of a GGUF file wrote down.
_SHORT_NAMES = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
_COMPUTED = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


def pooling_of(folder: Path) -> inference_pb2.Pooling:
    """The pooling that a model was trained with, as its modules.json or its GGUF file says; LAST if neither does.

    Raises ConfigError if a file is broken, or says that vectors are made in another way than Embed makes them.
    """
    path = folder / "modules.json"
    try:
        modules = read_json(path)
    except FileNotFoundError:
        return _POOLINGS.get(_SHORT_NAMES.get(read_origin(folder).pooling or "", ""), inference_pb2.POOLING_LAST)
    except ValueError as error:
        raise ConfigError(f"{path} {error}") from error
    fields = [each if isinstance(each, dict) else {} for each in modules] if isinstance(modules, list) else []
    kinds = [str(each.get("type")).rpartition(".")[2] for each in fields]
    if kinds not in _COMPUTED:
        names = ", ".join(map(quoted, kinds[:8])) or "none"
        raise ConfigError(f"{path}: the modules must be {', '.join(_COMPUTED[1])}; they are {names}")
    return _pooling(folder, fields[1].get("path"))


def _pooling(folder: Path, name: Json) -> inference_pb2.Pooling:
    if not isinstance(name, str) or Path(name).name != name:
        raise ConfigError(f"{folder / 'modules.json'}: the path of Pooling must be a folder here, not {quoted(name)}")
    path = folder / name / "config.json"
    try:
        config = read_json_object(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}, which modules.json names") from None
    except ValueError as error:
        raise ConfigError(f"{path} {error}") from error
    prefix = "pooling_mode_"
    modes = [field.removeprefix(prefix) for field, value in config.items() if field.startswith(prefix) and value]
    if "pooling_mode" in config:
        mode = str(config["pooling_mode"])
        modes = [_SHORT_NAMES.get(mode, mode)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        found = quoted(", ".join(modes) or "none")
        raise ConfigError(f"{path}: the pooling must be one of {', '.join(_POOLINGS)}; it is {found}")
    return _POOLINGS[modes[0]]
