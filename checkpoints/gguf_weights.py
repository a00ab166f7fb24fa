"""The tensors of a GGUF file by the names of a Hugging Face checkpoint, read from the mapped file some rows at a time.

Matrices in the formats of gguf_blocks.py keep their values. Those in other quantizations are dequantized to float32,
and so are vectors; matrices in F32, F16 and BF16 are what they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .folder import CheckpointError, quoted
from .gguf_blocks import READERS
from .gguf_config import LONG_FACTORS, SHORT_FACTORS, read_shape
from .gguf_families import ROPE_FACTORS, Family, family_of
from .gguf_family_fields import GATE_UP, ModelShape
from .gguf_file import TENSOR_TYPES, GgufFile, GgufTensor
from .stored import Grouping, Groups, Rows, StoredColumns, StoredTensor, widened

_BLOCKS = {kind: (values, num_bytes) for kind, values, num_bytes in TENSOR_TYPES.values()}
_WHOLE = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True, slots=True)
class StoredGguf:
    """A tensor of a GGUF file.

    order   [rows], the file's row that is each row of the checkpoint; None: its own order
    offset  what the file has added to each value
    """

    file: GgufFile
    tensor: GgufTensor
    order: NDArray[np.intp] | None = None
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def num_bytes(self) -> int:
        return self.tensor.data.nbytes

    @property
    def grouping(self) -> Grouping | None:
        reader = READERS.get(self.tensor.kind)
        return None if reader is None or len(self.shape) != 2 else reader.grouping

    @property
    def encoding(self) -> str:
        return self.tensor.kind if self.tensor.kind in _WHOLE and len(self.shape) > 1 else "F32"

    @property
    def is_quantized(self) -> bool:
        return self.tensor.kind not in _WHOLE

    def groups(self, rows: Rows) -> Groups:
        return READERS[self.tensor.kind].read(self._blocks(self._encoded(rows)))

    def whole(self, rows: Rows) -> NDArray[Any]:
        if len(self.shape) < 2:
            values = self._values(self.tensor.data).reshape(self.shape)
            if not self.shape:
                return values.copy()
            return values[rows if self.order is None else self.order[rows]] - np.float32(self.offset)
        encoded = self._encoded(rows)
        kind = self.tensor.kind
        return encoded.view(_WHOLE[kind]) if kind in _WHOLE else self._values(encoded)

    def blocks(self, rows: Rows) -> tuple[str, NDArray[np.uint8]] | None:
        return (self.tensor.kind, self._encoded(rows)) if len(self.shape) == 2 and self.is_quantized else None

    def columns(self, part: slice) -> StoredTensor:
        values, num_bytes = _BLOCKS[self.tensor.kind]
        first, last = part.start // values, -(-part.stop // values)
        data = self.tensor.data[:, first * num_bytes : last * num_bytes]
        cut = replace(self, tensor=replace(self.tensor, shape=(self.shape[0], (last - first) * values), data=data))
        inner = slice(part.start - first * values, part.stop - first * values)
        return cut if inner == slice(0, cut.shape[1]) else StoredColumns(cut, inner)

    def release(self) -> None:
        self.file.mapped.release(self.tensor.data)

    def _encoded(self, rows: Rows) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.tensor.data[rows if self.order is None else self.order[rows]])

    def _values(self, encoded: NDArray[np.uint8]) -> NDArray[np.float32]:
        """[rows, in], in the file's order."""
        kind = self.tensor.kind
        if kind in _WHOLE:
            values = encoded.view(_WHOLE[kind])
            return widened(values) if kind == "BF16" else values.astype(np.float32, copy=False)
        if (reader := READERS.get(kind)) is not None:
            return reader.read(self._blocks(encoded)).dequantize(reader.grouping)
        return _dequantized(encoded, kind)

    def _blocks(self, encoded: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return encoded.reshape(len(encoded), -1, _BLOCKS[self.tensor.kind][1])


def _dequantized(encoded: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """Values of a rare format, by its own library, which takes a while to import."""
    import gguf

    values: NDArray[np.float32] = gguf.quants.dequantize(encoded, gguf.GGMLQuantizationType[kind])
    return values


def open_gguf_weights(file: GgufFile) -> dict[str, StoredGguf]:
    """The tensors of a model by their names in a checkpoint. None of their data is read.

    Raises CheckpointError for an architecture that is not supported, a missing or unknown tensor, or a quantization
    that cannot be read.
    """
    shape, family = read_shape(file), family_of(file)
    names = _tensor_names(file, shape, family)
    _check_names(file, names, shape)
    _check_sizes(file, names, shape)
    for tensor in file.tensors.values():
        _check_kind(file, tensor)
    found = {
        hf_name: _stored(file, part, shape, family)
        for name, patterns in names.items()
        for hf_name, part in _parts(file, file.tensors[name], patterns, shape, family)
    }
    for field, (pattern, of_shape) in family.numbers.items():
        numbers = file.number_tensors(field, shape.num_layers, of_shape)
        found |= {f"{family.names.layers}.{i}.{pattern}": StoredGguf(file, each) for i, each in enumerate(numbers)}
    return found


def _parts(
    file: GgufFile, tensor: GgufTensor, patterns: tuple[str, ...], shape: ModelShape, family: Family
) -> Iterator[tuple[str, GgufTensor]]:
    """A tensor, or each expert's part of it, by its name in the checkpoint. With several names each has equal rows."""
    if tensor.name.split(".")[-2] in family.one_row:
        tensor = replace(tensor, shape=(1, math.prod(tensor.shape)))
    if "{}" not in patterns[0]:
        yield patterns[0], tensor
        return
    if len(tensor.shape) < 2 or tensor.shape[0] != shape.num_experts:
        raise CheckpointError(
            f"{file.name}: {tensor.name} has shape {list(tensor.shape)}, not parts of {shape.num_experts} experts"
        )
    _, size, *width = tensor.shape
    if size % len(patterns) or (len(patterns) > 1 and not width and tensor.kind not in _WHOLE):
        raise CheckpointError(f"{file.name}: {tensor.name} cannot be divided into {len(patterns)} equal parts")
    row_bytes = tensor.data.shape[-1] // (1 if width else len(patterns))
    parts = tensor.data.reshape(shape.num_experts * len(patterns), -1, row_bytes)
    names = (pattern.format(number) for number in range(shape.num_experts) for pattern in patterns)
    for name, part in zip(names, parts, strict=True):
        yield name, replace(tensor, shape=(size // len(patterns), *width), data=part)


def _stored(file: GgufFile, tensor: GgufTensor, shape: ModelShape, family: Family) -> StoredGguf:
    offset = family.norm_offset if tensor.name.endswith("norm.weight") else 0.0
    return StoredGguf(file, tensor, _row_order(tensor, shape, family), offset)


def _check_kind(file: GgufFile, tensor: GgufTensor) -> None:
    """Raise CheckpointError for a type that holds no weights, or that no reader here supports."""
    kind = tensor.kind
    if kind in _WHOLE or kind in READERS:
        return
    import gguf

    try:
        gguf.quants.dequantize(tensor.data[:1, : _BLOCKS[kind][1]], gguf.GGMLQuantizationType[kind])
    except (NotImplementedError, KeyError) as error:
        message = f"{file.name}: {quoted(tensor.name)} is quantized as {kind}, which is not supported"
        raise CheckpointError(message) from error


def _tensor_names(file: GgufFile, shape: ModelShape, family: Family) -> dict[str, tuple[str, ...]]:
    """The checkpoint's names of every tensor of a model of this shape, keyed by its GGUF name: see `_parts`."""
    outer = {"token_embd": family.names.embedding}
    if family.has_norm_weight:
        outer["output_norm"] = family.names.final_norm
    if not shape.is_tied:
        outer["output"] = family.names.head
    if family.names.positions:
        outer["position_embd"] = family.names.positions
    names: dict[str, tuple[str, ...]] = {f"{ours}.weight": (f"{theirs}.weight",) for ours, theirs in outer.items()}
    if family.has_norm_bias:
        names["output_norm.bias"] = (f"{family.names.final_norm}.bias",)
    if family.has_head_bias:
        names["output.bias"] = (f"{family.names.head}.bias",)
    biased = {stem for group in shape.biases for stem in family.biases[group]}
    biased |= {GATE_UP} if "ffn_gate_exps" in biased else set()
    absent = {stem for stem in family.optional if f"blk.0.{stem}.weight" not in file.tensors}
    for layer in range(shape.num_layers):
        prefix = f"{family.names.layers}.{layer}"
        for ours, theirs in _layer_tensors(file, shape, family, layer).items():
            if ours in absent:
                continue
            if "." in ours:
                names[f"blk.{layer}.{ours}"] = (f"{prefix}.{theirs[0]}",)
                continue
            names[f"blk.{layer}.{ours}.weight"] = tuple(f"{prefix}.{each}.weight" for each in theirs)
            if ours in biased or (family.has_norm_bias and ours.endswith("norm")):
                names[f"blk.{layer}.{ours}.bias"] = tuple(f"{prefix}.{each}.bias" for each in theirs)
    return names


def _layer_tensors(file: GgufFile, shape: ModelShape, family: Family, layer: int) -> dict[str, tuple[str, ...]]:
    """The family's tensors of a layer, where a file may have gate and up of experts in one, or experts one by one."""
    of_mlp = family.experts if shape.is_expert[layer] else family.mlp
    found: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in {**family.tensors, **of_mlp}.items()}
    if not shape.is_expert[layer]:
        return found
    if f"blk.{layer}.{GATE_UP}.weight" in file.tensors:
        found[GATE_UP] = found.pop("ffn_gate_exps") + found.pop("ffn_up_exps")
    elif f"blk.{layer}.ffn_gate.0.weight" in file.tensors:  # as llama.cpp wrote Mixtral until April 2024
        for stem in ("ffn_gate", "ffn_up", "ffn_down"):
            (pattern,) = found.pop(f"{stem}_exps")
            for number in range(shape.num_experts):
                found[f"{stem}.{number}.weight"] = (f"{pattern.format(number)}.weight",)
    return found


def _check_names(file: GgufFile, names: Collection[str], shape: ModelShape) -> None:
    if missing := [name for name in names if name not in file.tensors]:
        raise CheckpointError(f"{file.name} lacks {len(missing)} of {len(names)} tensors, first {missing[0]}")
    known = {*names, ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
    beyond = tuple(f"blk.{layer}." for layer in range(shape.num_layers, shape.num_layers + shape.num_further))
    if unknown := [name for name in file.tensors if name not in known and not name.startswith(beyond)]:
        raise CheckpointError(
            f"{file.name} has {len(unknown)} tensors unknown to its architecture, first {quoted(unknown[0])}"
        )


def _check_sizes(file: GgufFile, names: Collection[str], shape: ModelShape) -> None:
    """Raise CheckpointError for a tensor that does not have the shape that the metadata gives it."""
    queries, keys, hidden = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.hidden_size
    sizes = {
        "token_embd": (shape.vocab_size, hidden),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_qkv": (queries + 2 * keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_down": (hidden, shape.ffn_size),
    }
    for name in names:
        stem, kind = name.split(".")[-2:]
        if stem not in sizes:
            continue
        expected = sizes[stem] if kind == "weight" else sizes[stem][:1]
        if (found := file.tensors[name].shape) != expected:
            raise CheckpointError(
                f"{file.name}: {name} has shape {list(found)}, but the metadata makes it {list(expected)}"
            )


def _row_order(tensor: GgufTensor, shape: ModelShape, family: Family) -> NDArray[np.intp] | None:
    """For each row of a tensor in the checkpoint, the GGUF's row that holds it; None if the orders agree."""
    stem = tensor.name.split(".")[-2]
    if family.is_permuted and stem in ("attn_q", "attn_k"):
        heads, dims = shape.num_heads if stem == "attn_q" else shape.num_kv_heads, (shape.head_dim // 2, 2)
    elif family.has_qkv_by_head and stem == "attn_qkv":
        heads, dims = 3, (shape.num_heads, shape.head_dim)
    else:
        return None
    order = np.arange(tensor.shape[0]).reshape(heads, *dims)
    return (order.swapaxes(1, 2) if family.is_permuted else order.swapaxes(0, 1)).reshape(-1)
