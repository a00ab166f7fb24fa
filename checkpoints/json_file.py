"""JSON documents as the files of a Hugging Face folder hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]


def write_json(path: Path, document: Mapping[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json_object(path: Path) -> dict[str, Json]:
    """Raises OSError if the file cannot be read, ValueError if it does not hold one JSON object."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"holds a {type(document).__name__}, not an object")
    return document
