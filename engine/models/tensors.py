"""Where a model's weights come from: a folder's files, of which a few rows at a time are read, or random numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.folder import CheckpointError, quoted
from ...checkpoints.progress import Progress, no_progress
from ...checkpoints.stored import (
    MAX_SCALE,
    NOT_FINITE,
    VALUES_AT_ONCE,
    StoredPart,
    StoredTensor,
    check_groups,
    pieces,
)
from ...checkpoints.weight_files import open_weights
from ...kernels import (
    GroupedFormat,
    GroupedWeight,
    PackedGroups,
    PackedInt8,
    quantize_int4_native,
    read_groups,
    read_values,
    reads_blocks,
)
from ..core.errors import ConfigError
from .share import Cut

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
PACKED_AT_ONCE = 1 << 23  # values of a matrix, as much of whose file is resident meanwhile
NUM_READERS = 2  # threads that decode what comes next while the last piece is copied

A = TypeVar("A")
B = TypeVar("B")
Packed = PackedGroups | PackedInt8
Weight = Tensor | GroupedWeight | Packed


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
    whole_size  rows in the checkpoint, of which `order` names some; None: `size`
    columns     inputs of a matrix that a rank multiplies; its product is summed over ranks, and rank 0 adds the bias
    """

    name: str
    size: int
    order: Tensor | None = None
    factor: float | Tensor = 1.0
    offset: float = 0.0
    is_transposed: bool = False
    expert: int | None = None
    is_bare: bool = False
    whole_size: int | None = None
    columns: Cut | None = None

    def taking(self, index: Tensor) -> Rows:
        """Some of these rows.

        index  [rows] int64, their places
        """
        return replace(
            self,
            size=len(index),
            order=index if self.order is None else self.order[index],
            factor=self.factor[index] if isinstance(self.factor, Tensor) and self.factor.dim() else self.factor,
            whole_size=self.whole_size or self.size,
        )

    def shape_of(self, place: Weight) -> tuple[int, ...]:
        """The shape in the checkpoint of what fills `place`."""
        shape = tuple(place.shape)
        if self.whole_size is not None:
            shape = (self.whole_size, *shape[1:])
        return shape if self.columns is None or len(shape) == 1 else (shape[0], self.columns.whole)

    def tensor_name(self, kind: str) -> str:
        """Its name in the checkpoint; kind: weight or bias."""
        if self.is_bare:
            return self.name if kind == "weight" else f"{self.name}_{kind}"
        return f"{self.name}.{kind}"

    def index(self, part: slice) -> slice | np.ndarray:
        """Which of the checkpoint's rows come where some rows are wanted."""
        return part if self.order is None else self.order[part].numpy()

    def factor_of(self, part: slice) -> float | Tensor:
        """A number, or one for each of some rows."""
        return (
            self.factor[part].float() if isinstance(self.factor, Tensor) and self.factor.dim() else float(self.factor)
        )

    @property
    def is_unchanged(self) -> bool:
        """Whether there is neither an offset nor a factor."""
        return not self.offset and not isinstance(self.factor, Tensor) and self.factor == 1

    def changed(self, tensor: Tensor, part: slice) -> Tensor:
        """Some rows of the checkpoint, in order, with the offset and the factor."""
        if self.offset:
            tensor = tensor.float() + self.offset
        factor = self.factor_of(part)
        if isinstance(factor, Tensor):
            return tensor.float() * factor.view(-1, *[1] * (tensor.dim() - 1))
        return tensor if factor == 1 else tensor.float() * factor


class Tensors(Protocol):
    """Where weights come from."""

    def format_of(self, name: str) -> GroupedFormat | None:
        """The format of a weight that can fill a `GroupedWeight`; None for any other name."""

    def has(self, name: str) -> bool: ...

    def fill(self, place: Weight, name: str, rows: Rows) -> None: ...


class Checkpoint:
    """The tensors in a folder's files.

    Reading a tensor takes memory for some rows of it, besides the place that it fills. Raises ConfigError if a file is
    missing or broken.
    """

    def __init__(self, folder: Path, progress: Progress = no_progress) -> None:
        self._progress, self._folder = progress, folder
        try:
            self._tensors = open_weights(folder)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        self._total, self._done = sum(stored.num_bytes for stored in self._tensors.values()), 0
        self._readers = ThreadPoolExecutor(NUM_READERS, "weights")
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def format_of(self, name: str) -> GroupedFormat | None:
        stored = self._tensors.get(name)
        return None if stored is None else _format(stored)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a tensor; bfloat16 for one that is quantized. Raises ConfigError as `fill` does."""
        stored = self._stored(name)
        return torch.bfloat16 if stored.is_quantized else _dtype(name, stored)

    def fill(self, place: Weight, name: str, rows: Rows) -> None:
        """Converts a tensor, whose rows are arranged as `rows` says, to the dtype and device of `place`.

        Raises ConfigError if there is no such tensor, or if it has another shape or a format that is not supported.
        """
        stored = self._stored(name)
        self._read.add(name)
        if rows.expert is not None and (not stored.shape or stored.shape[0] <= rows.expert):
            raise ConfigError(f"tensor {name} has shape {list(stored.shape)}, without a part for expert {rows.expert}")
        if rows.expert is not None or rows.is_transposed:
            stored = StoredPart(stored, rows.expert, rows.is_transposed)
        if stored.shape != (wanted := rows.shape_of(place)):
            shapes = f"shape {list(stored.shape)} in {self._folder.name}, but config.json makes it {list(wanted)}"
            raise ConfigError(f"tensor {name} has {shapes}")
        source = stored
        if rows.columns is not None and len(wanted) > 1:
            stored = stored.columns(slice(rows.columns.start, rows.columns.stop))
        if isinstance(place, Packed) and rows.is_unchanged and _has_readable_blocks(stored, place):
            for part, target in _in_pieces(place, PACKED_AT_ONCE):
                _pack_blocks(stored, rows, part, target)
                source.release()
        else:
            self._read_values(place, name, stored, rows, source)
        if isinstance(place, PackedInt8) and not place.is_finite:
            raise ConfigError(f"tensor {name} has {NOT_FINITE}")
        self._done += source.num_bytes
        self._progress("loading weights", self._done, self._total)

    def _read_values(self, place: Weight, name: str, stored: StoredTensor, rows: Rows, source: StoredTensor) -> None:
        """Fill a place by way of values or groups in its file's format, some rows at a time.

        source  the tensor of which `stored` may be some columns
        """
        form, dtype = _format(stored), _dtype(name, stored)

        def read(job: tuple[Weight, slice]) -> Weight:
            target, part = job
            if isinstance(target, GroupedWeight | PackedGroups) and target.format == form:
                place = target if isinstance(target, GroupedWeight) else GroupedWeight.allocate(form, *target.shape)
                return _grouped(name, stored, rows, part, place)
            weight = rows.changed(_whole(stored, rows, part, dtype), part)
            if not isinstance(target, PackedInt8):
                _check_finite(name, weight, target)
            return weight

        jobs = [(target, part) for part, target in _in_pieces(place, VALUES_AT_ONCE)]
        for (target, _), weight in zip(jobs, _ahead(self._readers, read, jobs), strict=True):
            if isinstance(target, GroupedWeight | PackedGroups) and isinstance(weight, Tensor):
                weight = _packed(name, weight)
            if weight is not target:
                target.copy_(weight)
            source.release()

    def refuse_unread(self, is_inert: Callable[[str], bool]) -> None:
        """Raise ConfigError for a tensor that filled nothing, unless it is inert or a bias of zeros.

        Quantizers write such biases for products that have none.
        """
        for name, stored in self._tensors.items():
            if name in self._read or is_inert(name):
                continue
            if name.endswith(".bias") and len(stored.shape) == 1 and not stored.whole(slice(None)).any():
                continue
            raise ConfigError(f"tensor {quoted(name)} of {self._folder.name} is not used by this family")

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ConfigError(f"tensor {name} is missing in {self._folder}")
        return self._tensors[name]


def _ahead(readers: ThreadPoolExecutor, read: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """What `read` returns for each item, in order; while one is used, the next are read."""
    waiting: deque[Future[B]] = deque()
    for item in items:
        waiting.append(readers.submit(read, item))
        if len(waiting) > NUM_READERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class RandomTensors:
    """Weights as an untrained model has them, drawn on their own device: for measurements.

    form  of all weights except norms and biases; None: none is in groups
    """

    def __init__(self, form: GroupedFormat | None = None) -> None:
        self._form = form

    def format_of(self, name: str) -> GroupedFormat | None:
        return None if "norm" in name else self._form

    def has(self, name: str) -> bool:
        return True

    def fill(self, place: Weight, name: str, rows: Rows) -> None:
        if isinstance(place, GroupedWeight):
            levels = 1 << place.format.bits  # equally likely; their standard deviation is levels / √12
            place.values.random_(0, 256)
            step = INITIALIZER_RANGE * 12**0.5 / levels
            place.scales.fill_(step)
            if place.minimums is not None:
                place.minimums.fill_(-step * (levels - 1) / 2)
        elif isinstance(place, PackedGroups):
            whole = GroupedWeight.allocate(place.format, *place.shape)
            self.fill(whole, name, rows)
            place.copy_(whole)
        elif isinstance(place, PackedInt8):
            place.copy_(torch.empty(place.shape, dtype=torch.bfloat16).normal_(std=INITIALIZER_RANGE))
        elif "norm" in name:
            place.fill_(1.0)
        else:
            place.normal_(std=INITIALIZER_RANGE)


def _format(stored: StoredTensor) -> GroupedFormat | None:
    grouping = stored.grouping
    if grouping is None:
        return None
    return GroupedFormat(*astuple(grouping))


def _dtype(name: str, stored: StoredTensor) -> torch.dtype:
    if stored.encoding not in FORMATS:
        raise ConfigError(f"tensor {name} is stored as {stored.encoding}; supported: {', '.join(FORMATS)}")
    return FORMATS[stored.encoding]


def _in_pieces(place: Weight, values_at_once: int) -> Iterator[tuple[slice, Any]]:
    """Rows of a place, about so many values at a time, and which ones they are."""
    parts = list(pieces(tuple(place.shape), values_at_once))
    places = place.split([part.stop - part.start for part in parts]) if place.shape else [place]
    return zip(parts, places, strict=True)


def _has_readable_blocks(stored: StoredTensor, place: Packed) -> bool:
    """Whether compiled code packs a tensor from its blocks, which a place in groups needs in its own format."""
    blocks = stored.blocks(slice(0, 0))
    if blocks is None or stored.grouping is None or not reads_blocks(blocks[0]):
        return False
    return isinstance(place, PackedInt8) or place.format == _format(stored)


def _pack_blocks(stored: StoredTensor, rows: Rows, part: slice, target: Packed) -> None:
    blocks = stored.blocks(rows.index(part))
    assert blocks is not None
    assert stored.grouping is not None
    target.copy_blocks(blocks[0], torch.from_numpy(blocks[1]), stored.grouping.table)


def _whole(stored: StoredTensor, rows: Rows, part: slice, dtype: torch.dtype) -> Tensor:
    blocks = stored.blocks(rows.index(part))
    if blocks is None or stored.grouping is None or not reads_blocks(blocks[0]):
        return torch.from_numpy(stored.whole(rows.index(part))).view(dtype).contiguous()
    values = torch.empty(part.stop - part.start, *stored.shape[1:])
    read_values(blocks[0], torch.from_numpy(blocks[1]), stored.grouping.table, values)
    return values


def _packed(name: str, weight: Tensor) -> GroupedWeight:
    packed = quantize_int4_native((weight if weight.dtype == torch.bfloat16 else weight.float()).contiguous())
    assert packed.minimums is not None
    if not packed.scales.max().item() <= MAX_SCALE or not packed.minimums.isfinite().all():
        raise ConfigError(f"tensor {name} has weights that do not fit into 4 bits: --quantization int4 cannot serve it")
    return packed


def _check_finite(name: str, weight: Tensor, target: Weight) -> None:
    """Raise ConfigError for values that are not finite, or would not be in the dtype of `target`."""
    dtype = target.dtype if isinstance(target, Tensor) and target.dtype == torch.float16 else weight.dtype
    values = weight.to(dtype if dtype.itemsize > 1 else torch.float32)
    # A sum takes a fortieth of the time, and is not finite if one of its values is not. A sum of others may overflow.
    if values.sum().isfinite() or values.isfinite().all():
        return
    raise ConfigError(f"tensor {name} has {f'values beyond those of {dtype}' if dtype != weight.dtype else NOT_FINITE}")


def _grouped(name: str, stored: StoredTensor, rows: Rows, part: slice, place: GroupedWeight) -> GroupedWeight:
    """Rows in the format of `place`: `place` itself, filled, where compiled code reads them."""
    form, blocks = place.format, stored.blocks(rows.index(part))
    if blocks is not None and reads_blocks(blocks[0]) and not place.values.is_cuda:
        read_groups(blocks[0], torch.from_numpy(blocks[1]), place)
        found = place
    else:
        groups = stored.groups(rows.index(part))
        assert stored.grouping is not None
        try:
            check_groups(f"tensor {name}", groups, stored.grouping)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        values, *numbers = (
            torch.from_numpy(np.ascontiguousarray(each))
            for each in (groups.values, groups.scales, groups.minimums)
            if each is not None
        )
        found = GroupedWeight.of_parts(form, values.view(form.values_shape[0]), *numbers)
    factor = rows.factor_of(part)
    return found if isinstance(factor, float) and factor == 1 else found.scaled(factor)
