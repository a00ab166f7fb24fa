"""Reads GGUF files with typed access to their metadata. Anything wrong with a file raises CheckpointError."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import gguf
import numpy as np
from numpy.typing import DTypeLike, NDArray

from .folder import CheckpointError, quoted

T = TypeVar("T")

# The package makes an object of 700 bytes for each element of an array, and two for a text. The largest vocabulary
# known, of 262,144 tokens, takes 2.1 million.
MAX_METADATA_PARTS = 1 << 22


class _BoundedReader(gguf.GGUFReader):
    """A reader that fails at the end of the file; the package's own reads nothing for as long as a bad length says."""

    _num_parts = 0

    def _get(
        self, offset: int, dtype: DTypeLike, count: int = 1, override_order: Literal["I", "S", "<"] | None = None
    ) -> NDArray[Any]:
        self._num_parts += 1
        if self._num_parts > MAX_METADATA_PARTS:
            raise ValueError(f"its metadata has more than {MAX_METADATA_PARTS} numbers and texts")
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if not 0 <= end <= len(self.data):
            raise ValueError(f"the file has {len(self.data)} bytes, but {end} are needed")
        return super()._get(offset, dtype, count, override_order)


class GgufFile:
    """An open GGUF file. Metadata is read at once; tensors stay on the disk until their data is touched.

    Raises CheckpointError if the file is not a GGUF file, is truncated or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        with path.open("rb") as file:
            if (magic := file.read(4)) != b"GGUF":
                raise CheckpointError(f"{path.name} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
        try:
            self._reader = _BoundedReader(path)
        except Exception as error:  # the reader trusts lengths: a bad one may raise anything in NumPy
            raise CheckpointError(f"{path.name} is truncated or corrupt: {quoted(error)}") from error
        self.tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        for tensor in self.tensors.values():
            if not tensor.n_elements:
                raise CheckpointError(f"{path.name} has a tensor without elements, {quoted(tensor.name)}")
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        return self._value(key, str, default)

    def integer(self, key: str, default: int | None = None) -> int:
        return self._value(key, int, default)

    def flag(self, key: str, default: bool) -> bool:
        return self._value(key, bool, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, float, default)
        return float(str(np.float32(value)))  # 1e-05, not float32's 9.999999747378752e-06

    def texts(self, key: str) -> list[str]:
        return [str(value) for value in self._value(key, list, None)]

    def integers(self, key: str) -> list[int]:
        return [int(value) for value in self._value(key, list, None)]

    def numbers(self, key: str) -> list[float]:
        return [float(value) for value in self._value(key, list, None)]

    def has(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    def _value(self, key: str, kind: type[T], default: T | None) -> T:
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise CheckpointError(f"{self.name} has no metadata field {key}")
            return default
        try:
            value: Any = field.contents()
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"{self.name} has an unreadable metadata field {key}: {quoted(error)}") from error
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            found = type(value).__name__
            raise CheckpointError(f"{self.name}: the metadata field {key} is a {found}, not a {kind.__name__}")
        return value
