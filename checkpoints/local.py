"""A Hugging Face folder that is already on this machine."""

from __future__ import annotations

from pathlib import Path

from pagoda_server.checkpoints.errors import CheckpointError
from pagoda_server.checkpoints.json_file import read_json_object

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"


def check_folder(folder: Path) -> Path:
    """The folder, if it has a readable config.json, a tokenizer.json and whole safetensors weights.

    Models that need no weights are the synthetic one, and those whose config.json says `"random_weights": true`.

    Raises CheckpointError that names the file which is missing or broken. Only the weights' headers are read.
    """
    config = _read(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{folder / 'config.json'} names no model_type")
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; other tokenizer files are not supported")
    if config["model_type"] != "synthetic" and config.get("random_weights") is not True:
        for path in _weight_files(folder):
            _check_weights(path)
    return folder


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / WEIGHTS_INDEX).is_file():
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}; other weights are not supported")
    weight_map = _read(folder / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / WEIGHTS_INDEX} has no weight_map")
    return [folder / str(name) for name in sorted({str(name) for name in weight_map.values()})]


def _check_weights(path: Path) -> None:
    """A header that parses and whose tensors end where the file ends: a download cut short fails here."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing, truncated or corrupt: {error}") from error


def _read(path: Path) -> dict[str, object]:
    try:
        return dict(read_json_object(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
