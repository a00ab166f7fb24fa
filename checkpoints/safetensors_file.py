"""Reads and writes the safetensors format a piece at a time.

The library's own writer needs every tensor in memory at once, and its reader needs torch to read bfloat16.

A file holds the header's length (8 bytes, little endian), the header (JSON: name → dtype, shape, offsets) and the data.
Source: the format's description in the safetensors repository.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's entry in the header; `dtype` is the format's name for it, such as "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes


class SafetensorsWriter:
    """Writes the data of `entries`, in order and in pieces of any size. Raises ValueError if the size is wrong."""

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        self._file = path.open("wb")
        self._remaining_bytes = sum(entry.num_bytes for entry in entries)
        self._file.write(_header(entries))

    def write(self, values: NDArray[np.generic]) -> None:
        self._remaining_bytes -= values.nbytes
        self._file.write(np.ascontiguousarray(values).data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self._remaining_bytes:
            raise ValueError(f"{self._remaining_bytes} bytes of tensor data are missing (negative: too many)")


def _header(entries: Sequence[TensorEntry]) -> bytes:
    document: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        document[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
        start = end
    header = json.dumps(document, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT_BYTES)
    return len(header).to_bytes(8, "little") + header


def read_entries(path: Path) -> dict[str, tuple[TensorEntry, int]]:
    """The tensors of a file by name, each with the offset in the file at which its data begins."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        document = json.loads(file.read(header_bytes))
    found = {}
    for name, fields in document.items():
        if name != "__metadata__":
            start, end = fields["data_offsets"]
            shape = tuple(fields["shape"])
            entry = TensorEntry(name, fields["dtype"], shape, (end - start) // max(1, math.prod(shape)))
            found[name] = entry, 8 + header_bytes + start
    return found
