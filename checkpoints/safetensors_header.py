"""The header of a safetensors file, checked: where each tensor lies.

A file holds the header's length (8 bytes, little endian), the header (JSON: name → dtype, shape, offsets) and the data.
Source: the format's description in the safetensors repository.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from .parsed_once import ParsedOnce

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20  # some 150,000 tensors; lists of empty lists take 36 times their text
ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's entry in the header.

    dtype  the format's name for it, such as "BF16"
    start  where the data begins, from the beginning of the file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(path: Path) -> list[TensorEntry]:
    """Every tensor of a file. Raises OSError if it cannot be read, or ValueError if it contradicts itself."""
    with path.open("rb") as file:
        size_bytes = path.stat().st_size
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if not 0 < header_bytes <= min(MAX_HEADER_BYTES, size_bytes - LENGTH_BYTES):
            raise ValueError(f"its header has {header_bytes} bytes, the file {size_bytes}")
        return parse_header(file.read(header_bytes), size_bytes)


header_of = ParsedOnce(read_header)


def parse_header(header: bytes, size_bytes: int) -> list[TensorEntry]:
    """Every tensor of a file with this header and size. Raises ValueError if they contradict each other."""
    try:
        document = json.loads(header)
    except RecursionError:
        raise ValueError("its header is nested too deep") from None
    data_start = LENGTH_BYTES + len(header)
    if not isinstance(document, dict):
        raise ValueError("its header is not an object")
    entries = [_entry(name, fields, data_start) for name, fields in document.items() if name != "__metadata__"]
    end = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != end:
            raise ValueError(f"tensor {entry.name} begins at byte {entry.start}, but the one before it ends at {end}")
        end += entry.num_bytes
    if end != size_bytes:
        raise ValueError(f"its tensors end at byte {end}, the file at {size_bytes}")
    return entries


def _entry(name: str, fields: object, data_start: int) -> TensorEntry:
    match fields:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if all(
            type(size) is int and size >= 0 for size in shape
        ):
            num_bytes = math.prod(shape) * ELEMENT_BYTES[dtype] if dtype in ELEMENT_BYTES else end - start
            if not 0 <= start <= end or end - start != num_bytes:
                raise ValueError(f"tensor {name} lies from {start} to {end}, but has {num_bytes} bytes")
            return TensorEntry(name, dtype, tuple(shape), data_start + start, num_bytes)
    raise ValueError(f"the entry of tensor {name} lacks a dtype, a shape or offsets")
