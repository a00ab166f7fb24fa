"""Reads the header of a GGUF file: metadata with typed access, and where each tensor lies in the mapped file.

Anything wrong with a file raises CheckpointError. Nothing is read for as long as a length in the file says: each length
is compared with the file's own first, and texts are counted. Source: docs/gguf.md in the ggml repository.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .folder import CheckpointError, quoted
from .mapped_file import HeldFile, MappedFile
from .parsed_once import ParsedOnce

T = TypeVar("T")

VERSIONS = (2, 3)
ALIGNMENT_BYTES = 32  # of tensors' data, where the file does not say
# The largest vocabulary known has 262,144 tokens and half a million merges. Four million texts take half a second.
MAX_TEXTS = 1 << 22
MAX_TENSORS, MAX_FIELDS = 1 << 17, 1 << 16
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4
CONTROL, USER_DEFINED, UNUSED, NORMAL = 3, 4, 5, 1  # types of tokens

# Number in the file → a tensor type's name, the values of a block and its bytes.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}

# Number in the file → how a metadata value is encoded.
_SCALARS = {
    number: struct.Struct("<" + code)
    for number, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_FLOAT, _TEXT, _ARRAY = 6, 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_U64_BYTES = 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file.

    kind   its type's name, such as "Q4_K"
    shape  rows first; the file lists the fastest dimension first
    data   [rows, bytes of a row] uint8, mapped; a vector is one row
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of metadata, which is read when it is asked for."""

    kind: int
    count: int
    start: int


class GgufFile:
    """An open GGUF file. The header is read at once; tensors stay on the disk until their data is touched.

    Raises CheckpointError if the file is not a GGUF file, is truncated or contradicts itself.
    """

    def __init__(self, path: Path, held: HeldFile | None = None, most_tensors: int = MAX_TENSORS) -> None:
        """
        held  the content of the file, if it has been read; None: it is mapped
        """
        self.path, self.name = path, path.name
        if held is None:
            with path.open("rb") as file:
                _check_magic(path, file.read(4))
            held = MappedFile(path)
        else:
            _check_magic(path, bytes(held.memory[:4]))
        self.mapped = held
        self._memory = self.mapped.memory
        self._position, self._num_texts = 4, 0
        self._read: set[str] = set()
        try:
            version = self._scalar(_U32)
            if version not in VERSIONS:
                raise ValueError(f"version {version} is not supported; {' and '.join(map(str, VERSIONS))} are")
            num_tensors, num_fields = self._scalar(_U64), self._scalar(_U64)
            if num_tensors > most_tensors or num_fields > MAX_FIELDS:
                raise ValueError(
                    f"it has {num_tensors} tensors and {num_fields} metadata fields;"
                    f" {most_tensors} and {MAX_FIELDS} are allowed"
                )
            self._fields = dict(self._field() for _ in range(num_fields))
            described = [self._tensor() for _ in range(num_tensors)]
            self.tensors = self._placed(described)
            held.release(held.data[: self._data_start])
        except (ValueError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path.name} is truncated or corrupt: {quoted(error)}") from error
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        return self._value(key, str, default)

    def integer(self, key: str, default: int | None = None) -> int:
        return self._value(key, int, default)

    def flag(self, key: str, default: bool) -> bool:
        return self._value(key, bool, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Finite."""
        value = float(str(np.float32(self._value(key, float, default))))  # 1e-05, not float32's 9.999999747378752e-06
        if not math.isfinite(value):
            raise CheckpointError(f"{self.name}: the metadata field {key} is {value}; a finite number is needed")
        return value

    def texts(self, key: str) -> list[str]:
        array = self._array(key)
        if array.kind != _TEXT:
            raise CheckpointError(f"{self.name}: the metadata field {key} does not hold texts")
        self._position = array.start
        try:
            return [self._bytes().decode() for _ in range(array.count)]
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.name} has an unreadable metadata field {key}: {quoted(error)}") from error

    def integers(self, key: str) -> list[int]:
        return [int(value) for value in self._numbers(key)]

    def numbers(self, key: str) -> list[float]:
        return [float(value) for value in self._numbers(key)]

    def number_tensors(self, key: str, count: int, shape: tuple[int, ...]) -> list[GgufTensor]:
        """The numbers of a list of metadata as tensors of one value each."""
        array = self._array(key)
        if array.kind != _FLOAT or array.count != count:
            raise CheckpointError(f"{self.name}: the metadata field {key} is not a list of {count} float32")
        data = self.mapped.data[array.start : array.start + 4 * count].reshape(count, 1, 4)
        return [GgufTensor(key, "F32", shape, each) for each in data]

    def has(self, key: str) -> bool:
        return key in self._fields

    def is_list(self, key: str) -> bool:
        return isinstance(self._fields.get(key), _Array)

    def unread(self, prefix: str) -> dict[str, Any]:
        """The fields with this prefix that no one has asked for; a list counts as its length."""
        return {
            key: value.count if isinstance(value, _Array) else value
            for key, value in self._fields.items()
            if key.startswith(prefix) and key not in self._read
        }

    def _value(self, key: str, kind: type[T], default: T | None) -> T:
        self._read.add(key)
        value: Any = self._fields.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.name} has no metadata field {key}")
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            found = "list" if isinstance(value, _Array) else type(value).__name__
            raise CheckpointError(f"{self.name}: the metadata field {key} is a {found}, not a {kind.__name__}")
        return value

    def _array(self, key: str) -> _Array:
        return self._value(key, _Array, None) if self.has(key) else self._value(key, list, None)  # type: ignore[return-value]

    def _numbers(self, key: str) -> list[Any]:
        array = self._array(key)
        if array.kind not in _SCALARS:
            raise CheckpointError(f"{self.name}: the metadata field {key} does not hold numbers")
        dtype = np.dtype(_SCALARS[array.kind].format)
        found: list[Any] = np.frombuffer(self._memory, dtype, array.count, array.start).tolist()
        return found

    def _needs(self, num_bytes: int) -> None:
        if self._position + num_bytes > len(self._memory):
            raise ValueError(f"the file has {len(self._memory)} bytes, but {self._position + num_bytes} are needed")

    def _scalar(self, form: struct.Struct) -> Any:
        self._needs(form.size)
        (value,) = form.unpack_from(self._memory, self._position)
        self._position += form.size
        return value

    def _bytes(self, most: int | None = None) -> bytes:
        size = self._scalar(_U64)
        if most is not None and size > most:
            raise ValueError(f"a name has {size} bytes, at most {most} are allowed")
        self._needs(size)
        self._position += size
        return bytes(self._memory[self._position - size : self._position])

    def _field(self) -> tuple[str, Any]:
        key, kind = self._bytes(MAX_NAME_BYTES).decode(), self._scalar(_U32)
        if kind == _TEXT:
            return key, self._bytes().decode(errors="replace")
        if kind != _ARRAY:
            return key, self._scalar(_scalar_type(kind))
        kind, count = self._scalar(_U32), self._scalar(_U64)
        array = _Array(kind, count, self._position)
        if kind != _TEXT:
            self._needs(num_bytes := count * _scalar_type(kind).size)
            self._position += num_bytes
        else:
            self._skip_texts(count)
        return key, array

    def _skip_texts(self, count: int) -> None:
        self._num_texts += count
        if self._num_texts > MAX_TEXTS:
            raise ValueError(f"its metadata has more than {MAX_TEXTS} texts")
        memory, position, unpack = self._memory, self._position, _U64.unpack_from
        last = len(memory) - _U64_BYTES
        for _ in range(count):
            if position > last:
                break
            position += _U64_BYTES + unpack(memory, position)[0]
        else:
            self._position = position
            return self._needs(0)
        raise ValueError(f"the file has {len(memory)} bytes, too few for a list of {count} texts")

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._bytes(MAX_NAME_BYTES).decode()
        num_dimensions = self._scalar(_U32)
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(
                f"tensor {quoted(name)} has {num_dimensions} dimensions, at most {MAX_DIMENSIONS} are allowed"
            )
        shape = tuple(self._scalar(_U64) for _ in range(num_dimensions))[::-1]
        return name, self._scalar(_U32), shape, self._scalar(_U64)

    def _placed(self, described: list[tuple[str, int, tuple[int, ...], int]]) -> dict[str, GgufTensor]:
        alignment = self.integer("general.alignment", ALIGNMENT_BYTES)
        if alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        self._data_start = data_start = -(-self._position // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, number, shape, offset in described:
            if name in found:
                raise ValueError(f"it has two tensors {quoted(name)}")
            if not (size := math.prod(shape)):
                raise CheckpointError(f"{self.name} has a tensor without elements, {quoted(name)}")
            if number not in TENSOR_TYPES:
                raise CheckpointError(f"{self.name}: tensor {quoted(name)} has the unknown type {number}")
            kind, block_values, block_bytes = TENSOR_TYPES[number]
            width = shape[-1] if shape else 1
            if width % block_values:
                raise ValueError(f"rows of {quoted(name)} have {width} values, no multiple of {kind}'s {block_values}")
            row_bytes = width // block_values * block_bytes
            self._position = data_start + offset
            self._needs(num_bytes := size // width * row_bytes)
            data = self.mapped.data[self._position : self._position + num_bytes].reshape(-1, row_bytes)
            found[name] = GgufTensor(name, kind, shape, data)
        return found


open_gguf = ParsedOnce(GgufFile)


def _check_magic(path: Path, magic: bytes) -> None:
    if magic != b"GGUF":
        raise CheckpointError(f"{path.name} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")


def _scalar_type(kind: int) -> struct.Struct:
    if kind not in _SCALARS:
        raise ValueError(f"a metadata value has the unknown type {kind}")
    return _SCALARS[kind]
