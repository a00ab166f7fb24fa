"""How an embedding model makes a vector of a text, as the files of Sentence Transformers in its folder say."""

from __future__ import annotations

from pathlib import Path

from pagoda.v1 import inference_pb2

from ...checkpoints.folder import Json, quoted, read_json, read_json_object
from ..errors import ConfigError

_POOLINGS = {
    "cls_token": inference_pb2.POOLING_CLS,
    "mean_tokens": inference_pb2.POOLING_MEAN,
    "lasttoken": inference_pb2.POOLING_LAST,
}
_SHORT_NAMES = {"cls": "cls_token", "mean": "mean_tokens"}  # in `pooling_mode`, which newer files have
_COMPUTED = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


def pooling_of(folder: Path) -> inference_pb2.Pooling:
    """The pooling that a model was trained with, as its modules.json says; LAST if there is no such file.

    Raises ConfigError if a file is broken, or says that vectors are made in another way than Embed makes them.
    """
    path = folder / "modules.json"
    try:
        modules = read_json(path)
    except FileNotFoundError:
        return inference_pb2.POOLING_LAST
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
