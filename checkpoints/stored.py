"""A tensor as a file stores it, whatever the format: values, or codes in groups that share a scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .folder import CheckpointError

Rows = slice | NDArray[np.intp]  # which rows of a tensor, in which order

ROWS_TOGETHER = 32  # what is read at a time begins at a multiple of these rows, which some weights are packed in
VALUES_AT_ONCE = 1 << 18  # decoded at a time: more leaves holes in the heap, less takes longer
MAX_SCALE = 127  # of 4-bit weights: kernels keep scale · Σ(value - 8) of 64 weights in fp16, whose maximum is 65,504
NOT_FINITE = "values that are not finite: the file is corrupt"

# What the codes of MXFP4 stand for, doubled: the values of float4 e2m1.
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _float8_values() -> NDArray[np.float32]:
    """The value of each code of float8 e4m3fn: 4 bits of exponent, 3 of mantissa; 127 and 255 are NaN."""
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    values = np.where(exponents, np.ldexp(1 + mantissas / 8, exponents - 7), np.ldexp(mantissas / 8, -6))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


FLOAT8_VALUES = _float8_values()


@dataclass(frozen=True, slots=True)
class Grouping:
    """How weights are grouped. The fields are those of `GroupedFormat` in kernels/grouped_weight.py."""

    bits: int
    group: int = 32
    has_minimum: bool = False
    table: tuple[int, ...] | None = None
    is_float: bool = False


INT4 = Grouping(4, has_minimum=True)


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of a matrix [rows, in] whose elements are scale * value + minimum. The fields are those of `GroupedWeight`.

    values    [rows, groups, group] int8, or the bits of float8 e4m3; in 4 bits [rows, groups, group / 2] uint8, the
              first half in low nibbles
    scales    [rows, groups] float16, or float32 of values in float8
    minimums  [rows, groups] float16, or None
    """

    values: NDArray[Any]
    scales: NDArray[Any]
    minimums: NDArray[np.float16] | None = None

    def part(self, groups: slice) -> Groups:
        """Views of some groups of each row."""
        minimums = None if self.minimums is None else self.minimums[:, groups]
        return Groups(self.values[:, groups], self.scales[:, groups], minimums)

    def dequantize(self, grouping: Grouping) -> NDArray[np.float32]:
        """[rows, in], each element rounded once."""
        codes = self.values
        if grouping.bits == 4:
            codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
            if grouping.table is not None:
                codes = np.array(grouping.table, np.float32)[codes]
        elif grouping.is_float:
            codes = FLOAT8_VALUES[codes]
        whole = codes.astype(np.float32, copy=False)
        whole = whole * self.scales[..., None].astype(np.float32)
        if self.minimums is not None:
            with np.errstate(invalid="ignore"):  # whoever loads the values checks them
                whole += self.minimums[..., None].astype(np.float32)
        return whole.reshape(len(whole), -1)


class StoredTensor(Protocol):
    """
    shape         rows first
    num_bytes     in the file
    grouping      None if the tensor is not in groups, or not in groups that fit ours
    encoding      the safetensors format's name of what `whole` returns; bfloat16 and float8 are bits there
    is_quantized  whether `whole` makes more bytes of the values than the file has
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def grouping(self) -> Grouping | None: ...

    @property
    def encoding(self) -> str: ...

    @property
    def is_quantized(self) -> bool: ...

    def groups(self, rows: Rows) -> Groups:
        """Rows of a tensor that has a `grouping`."""

    def whole(self, rows: Rows) -> NDArray[Any]:
        """Rows of any tensor, as values. They may be a view of the mapped file."""

    def blocks(self, rows: Rows) -> tuple[str, NDArray[np.uint8]] | None:
        """Rows as a GGUF file has them, [rows, bytes], and the type of their blocks; None: they are in no blocks."""

    def columns(self, part: slice) -> StoredTensor:
        """Some inputs of a matrix [out, in]. They are in groups if they are whole groups of it."""

    def release(self) -> None:
        """Give back the memory that reading has made resident. The file's pages stay in the system's cache."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor, without groups.

    expert         which part of a tensor [experts, …] it is; None: all of a tensor
    is_transposed  a matrix there is [in, out]
    inputs         of a matrix, the ones that it has; None: all of them
    """

    stored: StoredTensor
    expert: int | None = None
    is_transposed: bool = False
    inputs: slice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.stored.shape if self.expert is None else self.stored.shape[1:]
        shape = shape[::-1] if self.is_transposed else shape
        return shape if self.inputs is None else (shape[0], self.inputs.stop - self.inputs.start)

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes // (1 if self.expert is None else self.stored.shape[0])

    @property
    def grouping(self) -> Grouping | None:
        return None

    @property
    def encoding(self) -> str:
        return self.stored.encoding

    @property
    def is_quantized(self) -> bool:
        return self.stored.is_quantized

    def groups(self, rows: Rows) -> Groups:
        raise NotImplementedError("a part of a tensor has no groups")

    def whole(self, rows: Rows) -> NDArray[Any]:
        if self.expert is None:
            whole = self.stored.whole(slice(None))
        else:
            whole = self.stored.whole(slice(self.expert, self.expert + 1))[0]
        whole = whole.T if self.is_transposed else whole
        found = whole[rows] if self.inputs is None else whole[rows, self.inputs]
        return np.ascontiguousarray(found) if self.is_transposed else found

    def blocks(self, rows: Rows) -> None:
        return None

    def columns(self, part: slice) -> StoredTensor:
        first = 0 if self.inputs is None else self.inputs.start
        return replace(self, inputs=slice(first + part.start, first + part.stop))

    def release(self) -> None:
        self.stored.release()


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """Some inputs of a matrix [out, in] whose rows are read whole."""

    stored: StoredTensor
    part: slice

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[0], self.part.stop - self.part.start

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes

    @property
    def grouping(self) -> Grouping | None:
        grouping = self.stored.grouping
        is_whole = grouping is None or not (self.part.start % grouping.group or self.part.stop % grouping.group)
        return grouping if is_whole else None

    @property
    def encoding(self) -> str:
        return self.stored.encoding

    @property
    def is_quantized(self) -> bool:
        return self.stored.is_quantized

    def groups(self, rows: Rows) -> Groups:
        assert self.grouping is not None
        size = self.grouping.group
        return self.stored.groups(rows).part(slice(self.part.start // size, self.part.stop // size))

    def whole(self, rows: Rows) -> NDArray[Any]:
        return self.stored.whole(rows)[:, self.part]

    def blocks(self, rows: Rows) -> None:
        return None

    def columns(self, part: slice) -> StoredTensor:
        return StoredColumns(self, part)

    def release(self) -> None:
        self.stored.release()


def pieces(shape: tuple[int, ...], values_at_once: int = VALUES_AT_ONCE) -> Iterator[slice]:
    """Slices of the rows of a tensor, about so many values at a time."""
    num_rows = shape[0] if shape else 1
    width = int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, values_at_once // max(1, width) // ROWS_TOGETHER) * ROWS_TOGETHER
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def check_values(name: str, tensor: StoredTensor) -> None:
    """Raise CheckpointError, which names the tensor, for values that are not finite or that kernels cannot hold."""
    for rows in pieces(tensor.shape):
        if (grouping := tensor.grouping) is not None:
            check_groups(name, tensor.groups(rows), grouping)
        else:
            values = tensor.whole(rows)
            check_finite(name, widened(values) if tensor.encoding == "BF16" else values)
        tensor.release()


def check_groups(name: str, groups: Groups, grouping: Grouping) -> None:
    """Raise CheckpointError as `check_values` does."""
    check_finite(name, groups.scales)
    if grouping.bits == 4 and (greatest := _greatest(groups.scales)) > MAX_SCALE:
        raise CheckpointError(f"{name} has a scale of {greatest:g}; at most {MAX_SCALE} is supported")
    if groups.minimums is not None:
        check_finite(name, groups.minimums)
    if grouping.is_float and (groups.values & 127 == 127).any():  # NaN, with either sign
        raise CheckpointError(f"{name} has {NOT_FINITE}")


def check_finite(name: str, *arrays: NDArray[Any]) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise CheckpointError(f"{name} has {NOT_FINITE}")


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _greatest(values: NDArray[np.float16]) -> float:
    return float(np.abs(values).max(initial=np.float16(0)))
