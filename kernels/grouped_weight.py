"""Weights in groups: codes of a few bits, with a scale and perhaps a minimum for every few inputs of an output.

Files hold such weights in many formats. Most differ only in how they lay out these numbers, so that a weight can keep
the values of its file (GGUF's Q4_0 to Q8_0, AWQ, GPTQ, compressed-tensors, MXFP4, FP8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NIBBLES = 16  # the codes of 4 bits
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class GroupedFormat:
    """What a weight in groups is made of.

    bits         of a code: 4, 5, 6 or 8
    group        inputs that share a scale: 16 or 32; any number of them for values in float8, perhaps all
    has_minimum  an element is scale * value + minimum, else scale * value
    table        the 16 values in int8 that codes of 4 bits stand for; None: codes are the values
    is_float     values are float8 e4m3, without a minimum, and scales are float32

    Values are int8. Without a table they are 0…15 in 4 bits, -16…15 in 5 bits, -32…31 in 6 bits, and any int8 in
    8 bits; in 5 and 6 bits with a minimum they are 0…31 and 0…63.
    """

    bits: int = 4
    group: int = 32
    has_minimum: bool = False
    table: tuple[int, ...] | None = None
    is_float: bool = False

    def __post_init__(self) -> None:
        assert self.bits in (4, 5, 6, 8)
        assert self.group in (16, 32) or self.is_float
        assert not self.is_float or (self.bits == 8 and not self.has_minimum)
        assert self.table is None or (self.bits == 4 and len(self.table) == NIBBLES)

    @property
    def values_shape(self) -> tuple[torch.dtype, int]:
        """The dtype of stored values, and how many there are for a group."""
        if self.bits == 4:
            return torch.uint8, self.group // 2
        return torch.float8_e4m3fn if self.is_float else torch.int8, self.group

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float32 if self.is_float else torch.float16


INT4 = GroupedFormat(has_minimum=True)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A matrix [out, in] whose elements are scale * value + minimum.

    values    [out, groups, group] int8 or float8; in 4 bits [out, groups, group / 2] uint8: the codes of a group's
              first half are in low nibbles, those of the other half in high nibbles
    scales    [out, groups] float16, or float32 of values in float8
    minimums  [out, groups] float16, or None if the format has none
    """

    format: GroupedFormat
    values: Tensor
    scales: Tensor
    minimums: Tensor | None = None

    @staticmethod
    def allocate(form: GroupedFormat, out_size: int, in_size: int, device: torch.device = _CPU) -> GroupedWeight:
        """Allocate an uninitialized weight. `in_size` is a multiple of the format's group."""
        groups, rest = divmod(in_size, form.group)
        assert rest == 0
        dtype, size = form.values_shape
        return GroupedWeight(
            form,
            torch.empty(out_size, groups, size, dtype=dtype, device=device),
            torch.empty(out_size, groups, dtype=form.scale_dtype, device=device),
            torch.empty(out_size, groups, dtype=torch.float16, device=device) if form.has_minimum else None,
        )

    @staticmethod
    def of_parts(form: GroupedFormat, values: Tensor, scales: Tensor, minimums: Tensor | None = None) -> GroupedWeight:
        """A weight of parts that were read from somewhere. Raises ValueError if they are not as above."""
        dtype, size = form.values_shape
        if values.dtype != dtype or values.ndim != 3 or values.shape[2] != size:
            raise ValueError(f"its values are {_described(values)}, not {_name(dtype)} [out, groups, {size}]")
        assert (minimums is not None) == form.has_minimum
        for name, part in (("scales", scales), ("minimums", minimums)):
            if part is not None and (part.dtype != form.scale_dtype or part.shape != values.shape[:2]):
                wanted = f"{_name(form.scale_dtype)} {list(values.shape[:2])}"
                raise ValueError(f"its {name} are {_described(part)}, not {wanted}")
        return GroupedWeight(form, values, scales, minimums)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), self.values.shape[1] * self.format.group

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts())

    def split(self, sizes: int | list[int]) -> list[GroupedWeight]:
        """Views of `sizes` rows each, like `Tensor.split`."""
        parts = (torch.split(part, sizes) for part in self._parts())
        return [GroupedWeight(self.format, *rows) for rows in zip(*parts, strict=True)]

    def rows(self, index: Tensor) -> GroupedWeight:
        """A copy of the rows with these numbers [count] int64."""
        return GroupedWeight(self.format, *(part[index] for part in self._parts()))

    def copy_(self, source: GroupedWeight) -> None:
        assert source.format == self.format
        for part, other in zip(self._parts(), source._parts(), strict=True):
            part.copy_(other)

    def scaled(self, factor: float | Tensor) -> GroupedWeight:
        """The weight times a number, or times one for each row [out]."""
        by = factor.view(-1, 1) if isinstance(factor, Tensor) else factor
        values, *numbers = self._parts()
        return GroupedWeight(self.format, values, *((each.float() * by).to(each.dtype) for each in numbers))

    def whole_values(self) -> Tensor:
        """[out, groups, group] int8 or float8, what the codes stand for."""
        if self.format.bits != 4:
            return self.values
        codes = torch.cat([self.values & 15, self.values >> 4], dim=-1)
        if self.format.table is None:
            return codes.view(torch.int8)
        return torch.tensor(self.format.table, dtype=torch.int8, device=codes.device)[codes.int()]

    def dequantize(self) -> Tensor:
        """[out, in] float32, each element rounded once."""
        values = self.whole_values().float() * self.scales.float()[..., None]
        if self.minimums is not None:
            values += self.minimums.float()[..., None]
        return values.flatten(1)

    def _parts(self) -> tuple[Tensor, ...]:
        return (self.values, self.scales) if self.minimums is None else (self.values, self.scales, self.minimums)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(tensor: Tensor) -> str:
    return f"{_name(tensor.dtype)} {list(tensor.shape)}"
