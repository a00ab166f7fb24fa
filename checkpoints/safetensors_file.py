"""Reads tensors of a mapped safetensors file, and writes such a file a piece at a time.

The library's own writer needs every tensor in memory at once, and its reader parses the header for every tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .folder import CheckpointError, quoted
from .mapped_file import MappedFile
from .safetensors_header import ELEMENT_BYTES, header_of
from .stored import Grouping, Groups, Rows, StoredTensor

ALIGNMENT_BYTES = 64

# The format's names → NumPy's types; bfloat16 and float8, which NumPy lacks, are bits.
DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
    "U16": np.uint16, "I16": np.int16, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32, "I32": np.int32,
    "F32": np.float32, "U64": np.uint64, "I64": np.int64, "F64": np.float64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredValues:
    """A tensor of a safetensors file: its values, whatever they mean."""

    file: MappedFile
    encoding: str
    data: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    @property
    def grouping(self) -> Grouping | None:
        return None

    @property
    def is_quantized(self) -> bool:
        return False

    def groups(self, rows: Rows) -> Groups:
        raise NotImplementedError("values have no groups")

    def whole(self, rows: Rows) -> NDArray[Any]:
        return self.data[rows] if self.shape else self.data

    def blocks(self, rows: Rows) -> None:
        return None

    def columns(self, part: slice) -> StoredTensor:
        return replace(self, data=self.data[:, part])

    def release(self) -> None:
        self.file.release(self.data)


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises CheckpointError if it is missing, truncated or contradicts itself."""
    try:
        entries, file = header_of(path), MappedFile(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing, truncated or corrupt: {quoted(error)}") from error
    found: dict[str, StoredTensor] = {}
    for entry in entries:
        data: NDArray[Any] = file.data[entry.start : entry.start + entry.num_bytes]
        if entry.dtype in DTYPES:
            data = data.view(DTYPES[entry.dtype]).reshape(entry.shape)
        found[entry.name] = StoredValues(file, entry.dtype, data)
    return found


class SafetensorsWriter:
    """Writes tensors in float32 one after the other, in pieces of any size. Raises ValueError if the size is wrong."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._file = path.open("wb")
        self._remaining_bytes = sum(math.prod(shape) for shape in shapes.values()) * ELEMENT_BYTES["F32"]
        self._file.write(_header(shapes.items()))

    def write(self, values: NDArray[np.float32]) -> None:
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


def _header(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> bytes:
    document: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes:
        end = start + math.prod(shape) * ELEMENT_BYTES["F32"]
        document[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        start = end
    header = json.dumps(document, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT_BYTES)
    return len(header).to_bytes(8, "little") + header
