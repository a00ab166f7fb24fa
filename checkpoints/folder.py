"""Hugging Face folders: their JSON files, and what a usable one must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

GGUF = "model.gguf"  # or a link to the file of that format, which lies elsewhere
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_LONGEST_QUOTED = 300
# The largest known is the index of a checkpoint in many files: 9 MB. Lists of empty lists take 36 times their text.
MAX_JSON_BYTES = 16 << 20

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]


class CheckpointError(Exception):
    """A model that cannot be served; the message says what its user can do about it."""


def quoted(text: object) -> str:
    """What a file or a library says, as a part of an error's line: printable, and of bounded length."""
    start = str(text)[:_LONGEST_QUOTED]
    return "".join(each if each.isprintable() else " " for each in start) + "…" * (len(str(text)) > len(start))


def write_json(path: Path, document: Mapping[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json_object(path: Path) -> dict[str, Json]:
    """Read one JSON object. Raises what read_bounded does, also if the file holds anything else."""
    document = read_json(path)
    if not isinstance(document, dict):
        raise ValueError(f"holds a {type(document).__name__}, not an object")
    return document


def read_json(path: Path) -> Json:
    """Read one JSON value. Raises what read_bounded does, also if the file is not JSON."""
    content = read_bounded(path, MAX_JSON_BYTES)
    try:
        document: Json = json.loads(content)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    return document


def model_type_of(folder: Path) -> str:
    """What config.json calls the family; a few words for a list of models if it is damaged."""
    try:
        return str(read_json_object(folder / "config.json").get("model_type", ""))
    except (FileNotFoundError, ValueError):
        return "damaged config.json"


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Read a file. Raises FileNotFoundError, or ValueError whose message follows the file's name in a sentence."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if len(content) > most_bytes:
        raise ValueError(f"has more than {most_bytes} bytes, the limit")
    return content


def check_folder(folder: Path) -> Path:
    """Return the folder if it has a readable config.json, a tokenizer.json and complete weights.

    The synthetic model needs no weights, nor does one whose config.json says `"random_weights": true`. Only the headers
    of the weights are read.

    Raises CheckpointError, which names the missing or broken file.
    """
    config = read_config(folder)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{folder / 'config.json'} names no model_type")
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; other tokenizer files are not supported")
    if config["model_type"] != "synthetic" and config.get("random_weights") is not True:
        check_weights(folder)
    return folder


def read_config(folder: Path) -> dict[str, object]:
    """The fields of config.json. Raises CheckpointError if it is missing or broken."""
    return _read(folder / "config.json")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises CheckpointError if there are none, or their index is broken."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / WEIGHTS_INDEX).is_file():
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}; other weights are not supported")
    weight_map = _read(folder / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / WEIGHTS_INDEX} has no weight_map")
    names = {str(name) for name in weight_map.values()}
    for name in names:
        if Path(name).name != name or Path(name).suffix != ".safetensors":  # a path could lead out of the folder
            problem = "which is not a safetensors file of the folder"
            raise CheckpointError(f"{folder / WEIGHTS_INDEX} names {quoted(name)}, {problem}")
    return [folder / name for name in sorted(names)]


def check_weights(folder: Path) -> None:
    """Check that each header parses and its tensors end where the file ends: an incomplete download fails here."""
    from .safetensors_header import read_header

    if not linked_gguf(folder):
        for path in weight_files(folder):
            try:
                read_header(path)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path} is missing, truncated or corrupt: {quoted(error)}") from error


def linked_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has one. Raises CheckpointError if it is a link to a file that is gone."""
    path = folder / GGUF
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path.readlink()}, from which {folder.name} was imported, is gone: give its new path")
    return path.resolve() if path.exists() else None


def _read(path: Path) -> dict[str, object]:
    try:
        return dict(read_json_object(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} {error}") from error
