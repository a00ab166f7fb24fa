"""The weights of a model: read from a folder's files a few rows at a time, and turned at once into what computes.

Weights that the checkpoint holds in groups stay in groups if the backend takes them. Otherwise they are dequantized.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from itertools import groupby
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
    ROWS_TOGETHER,
    VALUES_AT_ONCE,
    StoredPart,
    StoredTensor,
    check_groups,
    pieces,
)
from ...checkpoints.weight_files import open_weights
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
    PackedGroups,
    PackedInt8,
    Use,
    quantize_int4_native,
    read_groups,
    read_values,
    reads_blocks,
)
from ..core.errors import ConfigError
from .share import WHOLE, Cut, Share

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
ROUNDED_TOGETHER = 64  # inputs of a product in int8
PACKED_AT_ONCE = 1 << 23  # values of a matrix, as much of whose file is resident meanwhile
NUM_READERS = 2  # threads that decode what comes next while the last piece is copied

A = TypeVar("A")
B = TypeVar("B")
Packed = PackedGroups | PackedInt8
Weight = Tensor | GroupedWeight | Packed
Place = TypeVar("Place", bound=Weight)


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


class Weights:
    """Makes the parts of a model from tensors, by the names that they have in a checkpoint without .weight or .bias.

    packs      round to 4 bits what the checkpoint holds whole, except embedding, head and routers
    share      the part of the model that is wanted
    num_bytes  of the weights so far, as they were loaded: a backend may pack them more densely
    """

    def __init__(
        self,
        tensors: Tensors,
        ops: Backend,
        device: torch.device,
        dtype: torch.dtype,
        packs: bool = False,
        share: Share = WHOLE,
    ) -> None:
        self.ops, self.dtype, self.share = ops, dtype, share
        self.device = torch.empty(0, device=device).device  # with its index, as tensors have it
        self.num_bytes = 0
        self._tensors, self._packs = tensors, packs and ops.keeps(INT4)

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

    def bias(self, rows: Sequence[Rows]) -> Tensor:
        """The biases of products with the same input, [out]. Where ranks sum their products, one of them adds it."""
        found = self._filled(self._empty(sum(each.size for each in rows)), rows, "bias")
        if (columns := rows[0].columns) is not None and columns.start:
            found.zero_()
        return found

    def bias_once(self, rows: Sequence[Rows]) -> Tensor:
        """Read biases that are needed only while the model is loaded, so `num_bytes` does not count them."""
        num_bytes = self.num_bytes
        found = self.bias(rows)
        self.num_bytes = num_bytes
        return found

    def linear(self, rows: Sequence[Rows], in_size: int, has_bias: bool = False, use: Use = PLAIN) -> Linear:
        """One product in place of several with the same input: their outputs are stacked in this order."""
        bias = self.bias(rows) if has_bias else None
        return self.ops.linear(self._stacked(rows, in_size), bias, use)

    def router(self, rows: Rows, in_size: int, has_bias: bool = False) -> Linear:
        """A product that is never quantized: its errors would change which experts are chosen."""
        bias = self.bias([rows]) if has_bias else None
        return self.ops.linear(self.whole(rows, in_size), bias, ROUTER)

    def numbers(self, name: str, *shape: int) -> Tensor:
        """A tensor by its whole name, in float32."""
        place = torch.empty(shape, device=self.device)
        return self._filled(place, [Rows(name, shape[0], is_bare=True)], "weight")

    def experts(self, parts: Sequence[ExpertRows], in_size: int, ffn_size: int, has_bias: bool, use: Use) -> Experts:
        """The products of experts, which are loaded and packed one by one."""

        def weight(rows: Sequence[Rows], in_size: int, form: GroupedFormat | None) -> tuple[Weight, Tensor | None]:
            bias = self.bias(rows) if has_bias else None
            return self._together(rows, in_size, form), bias

        first = self._common([rows for each in parts for rows in each.gate_up], in_size)
        second = self._common([each.down for each in parts], ffn_size)
        weights = (
            ExpertWeights(*weight(each.gate_up, in_size, first), *weight([each.down], ffn_size, second))
            for each in parts
        )
        return self.ops.experts(weights, len(parts), use)

    def has(self, rows: Rows) -> bool:
        return self._tensors.has(rows.tensor_name("weight"))

    def columns(self, rows: Sequence[Rows], in_size: int, name: str) -> Cut:
        """The rank's inputs of some products [out, in_size], which part no group of inputs that share a scale.

        Parts are equal where they are then a multiple of 64 inputs, which products in int8 round together.

        name  of what the inputs are, in the plural

        Raises ConfigError if there are too few.
        """
        form, count = self._common(rows, in_size), self.share.count
        together = ROUNDED_TOGETHER if form is None else math.lcm(ROUNDED_TOGETHER, form.group)
        if form is None or in_size % (together * count) == 0:
            return self.share.of(in_size, name)
        num_groups = in_size // form.group
        if num_groups < count:
            raise ConfigError(
                f"--tensor-parallel {count}: tensor {rows[0].name}.weight has {num_groups} groups of {form.group}"
                " inputs that share a scale, fewer than ranks; --quantization int8 and none cut anywhere"
            )
        return self.share.of(num_groups, name).times(form.group)

    def table(self, rows: Rows, in_size: int, is_multiplied: bool) -> Weight:
        """A matrix [size, in_size], in groups if the backend takes that. `is_multiplied`: it is the head, too."""
        if is_multiplied and not self.ops.packs_head_apart:
            return self._together([rows], in_size, self._kept(rows))
        form = self._tensors.format_of(rows.tensor_name("weight"))
        if form is not None and self.ops.looks_up(form):
            self._check_groups([rows], in_size, form)
            return self._filled(GroupedWeight.allocate(form, rows.size, in_size, self.device), [rows], "weight")
        return self._filled(self._empty(rows.size, in_size), [rows], "weight")

    def whole(self, rows: Rows, in_size: int) -> Tensor:
        """A matrix [size, in_size], never in groups."""
        return self._filled(self._empty(rows.size, in_size), [rows], "weight")

    def head(self, rows: Rows, hidden_size: int, has_bias: bool, tied_to: tuple[Rows, Weight] | None) -> Linear:
        """The product that gives the logits. `tied_to`: where its weight is, and the embedding, if it is that."""
        of_weight, table = tied_to or (rows, None)
        if table is None or self.ops.packs_head_apart:
            table = self._together([of_weight], hidden_size, self._kept(of_weight))
        bias = self.bias([rows]) if has_bias else None
        return self.ops.linear(table, bias, HEAD)

    def _stacked(self, rows: Sequence[Rows], in_size: int) -> list[Weight]:
        """Neighbours in the same format together: in groups if the backend keeps that, else whole."""
        parts = groupby(rows, lambda each: self._multiplied(each, in_size))
        return [self._together(list(part), in_size, form) for form, part in parts]

    def _common(self, rows: Sequence[Rows], in_size: int) -> GroupedFormat | None:
        """The format that all rows can be kept in together."""
        first, *others = {self._multiplied(each, in_size) for each in rows}
        return None if others else first

    def _multiplied(self, rows: Rows, in_size: int) -> GroupedFormat | None:
        """The format of a product's weight: the checkpoint's, or the one that it is rounded to."""
        form = self._kept(rows)
        return INT4 if form is None and self._packs and in_size % INT4.group == 0 else form

    def _kept(self, rows: Rows) -> GroupedFormat | None:
        form = self._tensors.format_of(rows.tensor_name("weight"))
        return form if self.ops.keeps(form) else None

    def _together(self, rows: Sequence[Rows], in_size: int, form: GroupedFormat | None) -> Weight:
        if form is not None:
            self._check_groups(rows, in_size, form)
        out_size = sum(each.size for each in rows)
        are_together = not any(each.size % ROWS_TOGETHER for each in rows[:-1])
        if are_together and (place := self.ops.place(form, out_size, in_size)):
            return self._filled(place, rows, "weight")
        if form is None:
            return self._filled(self._empty(out_size, in_size), rows, "weight")
        return self._filled(GroupedWeight.allocate(form, out_size, in_size, self.device), rows, "weight")

    def _check_groups(self, rows: Sequence[Rows], in_size: int, form: GroupedFormat) -> None:
        """Raise ConfigError if a group of inputs that share a scale would be cut."""
        for each in rows:
            if (cut := each.columns) is not None and (cut.start % form.group or cut.stop % form.group):
                raise ConfigError(
                    f"--tensor-parallel {self.share.count}: inputs {cut.start} to {cut.stop} of tensor"
                    f" {each.name}.weight would cut a group of {form.group} that share a scale;"
                    " --quantization int8 and none cut anywhere"
                )
        if in_size % form.group:
            raise ConfigError(
                f"tensor {rows[0].name}.weight is in {form.bits} bits, of which {form.group} inputs share a"
                f" scale, but config.json gives it {in_size} inputs: not a multiple of {form.group}"
            )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def _filled(self, place: Place, rows: Sequence[Rows], kind: str) -> Place:
        for each, part in zip(rows, place.split([each.size for each in rows]), strict=True):
            self._tensors.fill(part, each.tensor_name(kind), each)
        self.num_bytes += place.nbytes
        return place


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
