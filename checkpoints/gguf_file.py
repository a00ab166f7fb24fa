"""An opened GGUF file with typed access to its metadata; whatever is wrong with it is one CheckpointError."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import gguf
import numpy as np
from numpy.typing import DTypeLike, NDArray

from pagoda_server.checkpoints.errors import CheckpointError

T = TypeVar("T")


class _BoundedReader(gguf.GGUFReader):
    """Fails at the end of the file, where the package's reader goes on reading nothing for as long as a length says."""

    def _get(
        self, offset: int, dtype: DTypeLike, count: int = 1, override_order: Literal["I", "S", "<"] | None = None
    ) -> NDArray[Any]:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if not 0 <= end <= len(self.data):
            raise ValueError(f"it has {len(self.data)} bytes where {end} are needed")
        return super()._get(offset, dtype, count, override_order)


class GgufFile:
    """Metadata is read at once; tensors stay on the disk until their data is touched.

    Raises CheckpointError if the file is no GGUF file, is truncated or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        with path.open("rb") as file:
            if (magic := file.read(4)) != b"GGUF":
                raise CheckpointError(f"{path.name} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
        try:
            self._reader = _BoundedReader(path)
        except Exception as error:  # the reader takes lengths on trust: a bad one surfaces as any error of numpy's
            raise CheckpointError(f"{path.name} is truncated or corrupt: {error}") from error
        self.tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        return self._value(key, str, default)

    def integer(self, key: str, default: int | None = None) -> int:
        return self._value(key, int, default)

    def flag(self, key: str, default: bool) -> bool:
        return self._value(key, bool, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, float, default)
        return float(str(np.float32(value)))  # 1e-05 was written, 9.999999747378752e-06 is what float32 made of it

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
                raise CheckpointError(f"{self.name} has no metadata named {key}")
            return default
        try:
            value: Any = field.contents()
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"{self.name} has unreadable metadata under {key}: {error}") from error
        if not isinstance(value, kind):
            raise CheckpointError(f"{self.name} has a {type(value).__name__} under {key}, not a {kind.__name__}")
        return value
