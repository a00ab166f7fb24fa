"""The weights of a model: read from safetensors files one tensor at a time, and turned at once into what computes.

Weights that the checkpoint holds in groups (checkpoints/grouped_weights.py) stay in groups if the backend takes them.
Otherwise they are dequantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...checkpoints.folder import quoted, read_json_object
from ...checkpoints.grouped_weights import MINIMUMS, SCALES, VALUES, quantized_names
from ...checkpoints.progress import Progress, no_progress
from ...kernels import (
    HEAD,
    INT4,
    PLAIN,
    ROUTER,
    Backend,
    Experts,
    ExpertWeights,
    GroupedFormat,
    GroupedWeight,
    Linear,
    Use,
)
from ..core.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INITIALIZER_RANGE = 0.02  # of random weights, as in transformers
# The safetensors format's names of what can be converted to a weight.
FORMATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
VALUES_AT_ONCE = 1 << 20  # dequantized at a time: until the rows are in their place, a value takes some 12 bytes

Weight = Tensor | GroupedWeight
Place = TypeVar("Place", Tensor, GroupedWeight)


@dataclass(frozen=True, slots=True)
class Rows:
    """A part of the checkpoint, and what is folded into it when it is loaded.

    name    without .weight or .bias, unless it is bare: then the weight has this name, and the bias ends in _bias
    size    its number of rows
    order   [size] int64, which of the checkpoint's rows comes where; None: its own order
    factor  what rows are multiplied by: a number, or one for each row [size]
    offset  what is added to a norm's weight before that
    is_transposed  the checkpoint has [in, out] of a matrix
    expert  which part of a tensor [experts, …] it is; None: the tensor is not one of several experts
    """

    name: str
    size: int
    order: Tensor | None = None
    factor: float | Tensor = 1.0
    offset: float = 0.0
    is_transposed: bool = False
    expert: int | None = None
    is_bare: bool = False

    def tensor_name(self, kind: str) -> str:
        """Its name in the checkpoint; kind: weight or bias."""
        if self.is_bare:
            return self.name if kind == "weight" else f"{self.name}_{kind}"
        return f"{self.name}.{kind}"

    def of(self, tensor: Tensor, *, is_scaled: bool = True) -> Tensor:
        """The rows of a tensor [size, …], in order and multiplied; a tensor of another size as it is."""
        if self.is_transposed and tensor.dim() == 2:
            tensor = tensor.t()
        if not tensor.dim() or len(tensor) != self.size:
            return tensor
        if self.order is not None:
            tensor = tensor[self.order]
        if self.offset:
            tensor = tensor.float() + self.offset
        if not is_scaled or (isinstance(self.factor, float) and self.factor == 1):
            return tensor
        factor = torch.as_tensor(self.factor, dtype=torch.float32)
        return tensor.float() * (factor if factor.dim() == 0 else factor.view(-1, *[1] * (tensor.dim() - 1)))


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Where the weights of one expert are: those of its gate and up, which are one product, and of its down."""

    gate_up: Sequence[Rows]
    down: Rows


class Tensors(Protocol):
    """Where weights come from."""

    def format_of(self, name: str) -> GroupedFormat | None:
        """The format of a weight that can fill a `GroupedWeight`; None for any other name."""

    def has(self, name: str) -> bool: ...

    def fill(self, place: Weight, name: str, rows: Rows) -> None: ...


class Checkpoint:
    """The tensors in a folder's safetensors files.

    Reading a tensor takes memory for about that tensor, besides the place that it fills. Raises ConfigError if a file
    is missing or broken.
    """

    def __init__(self, folder: Path, progress: Progress = no_progress) -> None:
        self._progress = progress
        self._index = folder / INDEX_FILE if (folder / INDEX_FILE).exists() else folder / SINGLE_FILE
        self._files: dict[str, Path] = {}  # by tensor
        self._total = self._done = 0
        for path in _shards(self._index) if self._index.name == INDEX_FILE else [self._index]:
            with _opened(path) as file:
                self._files |= dict.fromkeys(file.keys(), path)
            self._total += _data_bytes(path)
        self._in_groups = quantized_names(self._files)

    def has(self, name: str) -> bool:
        return name in self._files or self.format_of(name) is not None

    def format_of(self, name: str) -> GroupedFormat | None:
        return INT4 if name in self._in_groups else None

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a tensor; bfloat16 for one in groups. Raises ConfigError as `fill` does."""
        if self.format_of(name) is not None:
            return torch.bfloat16
        with self._opened(name) as file:
            return _format(file, name)

    def fill(self, place: Weight, name: str, rows: Rows) -> None:
        """Converts a tensor, whose rows are arranged as `rows` says, to the dtype and device of `place`.

        Raises ConfigError if there is no such tensor, or if it has another shape or a format that is not supported.
        """
        form = self.format_of(name)
        parts = [name] if form is None else [name + part for part in (VALUES, SCALES, MINIMUMS)]
        # The file is opened for each tensor, because what was read of a mapped file stays resident until it is closed.
        with self._opened(*parts) as file:
            if form is not None:
                values, *scales = (_part(file, part, rows.expert) for part in parts)
                scales = [rows.of(part).to(part.dtype) for part in scales]
                weight: Weight = _grouped(name, form, [rows.of(values, is_scaled=False), *scales])
            else:
                weight = rows.of(_whole(file, name, rows.expert))
            if list(weight.shape) != list(place.shape):
                shapes = (
                    f"shape {list(weight.shape)} in {self._index.name}, but config.json makes it {list(place.shape)}"
                )
                raise ConfigError(f"tensor {name} has {shapes}")
            _copy(weight, place)
        self._done += weight.nbytes
        self._progress("loading weights", self._done, self._total)

    def _opened(self, *names: str) -> AbstractContextManager[Any]:
        """The file that holds these tensors."""
        for name in names:
            if name not in self._files:
                raise ConfigError(f"tensor {name} is missing in {self._index.name}")
        return _opened(self._files[names[0]])


class RandomTensors:
    """Weights as an untrained model has them, drawn on their own device: for measurements."""

    def format_of(self, name: str) -> GroupedFormat | None:
        return None

    def has(self, name: str) -> bool:
        return True

    def fill(self, place: Weight, name: str, rows: Rows) -> None:
        assert isinstance(place, Tensor)
        if "norm" in name:
            place.fill_(1.0)
        else:
            place.normal_(std=INITIALIZER_RANGE)


class Weights:
    """Makes the parts of a model from tensors, by the names that they have in a checkpoint without .weight or .bias.

    num_bytes  of the weights so far, as they were loaded: a backend may pack them more densely
    """

    def __init__(self, tensors: Tensors, ops: Backend, device: torch.device, dtype: torch.dtype) -> None:
        self.ops, self.dtype = ops, dtype
        self.num_bytes = 0
        self._tensors, self._device = tensors, device

    def norm(self, rows: Rows) -> Tensor:
        """The weight of a norm, [size]."""
        return self._filled(self._empty(rows.size), [rows], "weight")

    def norm_bias(self, rows: Rows) -> Tensor:
        """The bias of a norm, [size]."""
        return self._filled(self._empty(rows.size), [replace(rows, offset=0.0)], "bias")

    def number(self, name: str, *shape: int) -> float:
        """A tensor of one number, [] or [1] as `shape` says."""
        place = torch.empty(shape)
        self._tensors.fill(place, name, Rows(name, 1))
        return place.item()

    def ones(self, size: int) -> Tensor:
        """The weight of a norm that has none."""
        return self._empty(size).fill_(1.0)

    def linear(self, rows: Sequence[Rows], in_size: int, has_bias: bool = False, use: Use = PLAIN) -> Linear:
        """One product in place of several with the same input: their outputs are stacked in this order."""
        bias = self._filled(self._empty(sum(each.size for each in rows)), rows, "bias") if has_bias else None
        return self.ops.linear(self._stacked(rows, in_size), bias, use)

    def router(self, rows: Rows, in_size: int, has_bias: bool = False) -> Linear:
        """A product that is never quantized: its errors would change which experts are chosen."""
        bias = self._filled(self._empty(rows.size), [rows], "bias") if has_bias else None
        return self.ops.linear(self.whole(rows, in_size), bias, ROUTER)

    def numbers(self, name: str, *shape: int) -> Tensor:
        """A tensor by its whole name, in float32."""
        place = torch.empty(shape, device=self._device)
        return self._filled(place, [Rows(name, shape[0], is_bare=True)], "weight")

    def experts(self, parts: Sequence[ExpertRows], in_size: int, ffn_size: int, has_bias: bool, use: Use) -> Experts:
        """The products of experts, which are loaded and packed one by one."""

        def weight(rows: Sequence[Rows], in_size: int) -> tuple[Weight, Tensor | None]:
            bias = self._filled(self._empty(sum(each.size for each in rows)), rows, "bias") if has_bias else None
            return self._stacked(rows, in_size), bias

        weights = (ExpertWeights(*weight(each.gate_up, in_size), *weight([each.down], ffn_size)) for each in parts)
        return self.ops.experts(weights, len(parts), use)

    def has(self, rows: Rows) -> bool:
        return self._tensors.has(rows.tensor_name("weight"))

    def whole(self, rows: Rows, in_size: int) -> Tensor:
        """A matrix [size, in_size], never in groups."""
        return self._filled(self._empty(rows.size, in_size), [rows], "weight")

    def head(self, rows: Rows, hidden_size: int, has_bias: bool, tied_to: Tensor | None) -> Linear:
        """The product that gives the logits. With `tied_to` its weight is that matrix, and is not read."""
        weight = self._stacked([rows], hidden_size) if tied_to is None else tied_to
        bias = self._filled(self._empty(rows.size), [rows], "bias") if has_bias else None
        return self.ops.linear(weight, bias, HEAD)

    def _stacked(self, rows: Sequence[Rows], in_size: int) -> Weight:
        """In groups if all rows are in one format, which the backend keeps."""
        first, *others = {self._tensors.format_of(each.tensor_name("weight")) for each in rows}
        out_size = sum(each.size for each in rows)
        if first is not None and not others and self.ops.keeps(first):
            if in_size % first.group:
                raise ConfigError(
                    f"tensor {rows[0].name}.weight is in {first.bits} bits, of which {first.group} inputs share a"
                    f" scale, but config.json gives it {in_size} inputs: not a multiple of {first.group}"
                )
            return self._filled(GroupedWeight.allocate(first, out_size, in_size), rows, "weight")
        return self._filled(self._empty(out_size, in_size), rows, "weight")

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device, dtype=self.dtype)

    def _filled(self, place: Place, rows: Sequence[Rows], kind: str) -> Place:
        for each, part in zip(rows, place.split([each.size for each in rows]), strict=True):
            self._tensors.fill(part, each.tensor_name(kind), each)
        self.num_bytes += place.nbytes
        return place


def _format(file: Any, name: str) -> torch.dtype:
    stored = file.get_slice(name).get_dtype()
    if stored not in FORMATS:
        raise ConfigError(f"tensor {name} is stored as {stored}; supported: {', '.join(FORMATS)}")
    return FORMATS[stored]


def _whole(file: Any, name: str, expert: int | None) -> Tensor:
    _format(file, name)
    return _part(file, name, expert)


def _part(file: Any, name: str, expert: int | None) -> Tensor:
    """A tensor, or an expert's part of it."""
    if expert is None:
        return cast(Tensor, file.get_tensor(name))
    part = file.get_slice(name)
    if not part.get_shape() or part.get_shape()[0] <= expert:
        raise ConfigError(f"tensor {name} has shape {part.get_shape()}, without a part for expert {expert}")
    return cast(Tensor, part[expert])


def _grouped(name: str, form: GroupedFormat, parts: list[Tensor]) -> GroupedWeight:
    try:
        return GroupedWeight.of_parts(form, *parts)
    except ValueError as error:
        raise ConfigError(f"tensor {name} is in {form.bits} bits, but {error}") from None


def _copy(weight: Weight, place: Weight) -> None:
    if isinstance(weight, Tensor):
        assert isinstance(place, Tensor)
        place.copy_(weight)
    elif isinstance(place, GroupedWeight):
        place.copy_(weight)
    else:
        rows = max(1, VALUES_AT_ONCE // place.shape[1])
        for target, part in zip(place.split(rows), weight.split(rows), strict=True):
            target.copy_(part.dequantize())


def _shards(index: Path) -> list[Path]:
    try:
        weight_map: Any = read_json_object(index)["weight_map"]
        return [index.parent / str(name) for name in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index} is not the index of a sharded checkpoint") from None


def _data_bytes(path: Path) -> int:
    """The file without its header, whose length is in the first 8 bytes."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise ConfigError(f"the model folder has no {path.name}: {path.parent}") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {quoted(error)}") from None
