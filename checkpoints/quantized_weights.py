"""Quantized weights of safetensors files, in the formats that `quantization_config` of config.json names.

A module that a format leaves out keeps a whole weight, so which modules are quantized shows in the tensors' names.
Sources: AutoAWQ (gemm), GPTQModel, compressed-tensors, and transformers' integrations of finegrained FP8 and MXFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .folder import CheckpointError, quoted
from .gguf_blocks import powers_of_two
from .stored import (
    FLOAT8_VALUES,
    INT4,
    MXFP4_VALUES,
    Grouping,
    Groups,
    Rows,
    StoredColumns,
    StoredPart,
    StoredTensor,
    widened,
)

AWQ, GPTQ, COMPRESSED, FP8, MXFP4 = "awq", "gptq", "compressed-tensors", "fp8", "mxfp4"
GGUF = "gguf"  # written by our own import
SUPPORTED = (AWQ, GPTQ, COMPRESSED, FP8, MXFP4)
_FP8_METHODS = (FP8, "fbgemm_fp8")
# The bit at which each of the 8 outputs in a word of AWQ begins.
_AWQ_SHIFTS = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32) * 4
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class StoredQuantized:
    """A matrix [out, in], or a bias [out], made of several tensors.

    read       makes some rows and inputs of it: `Groups` where these are whole groups of the grouping, else float32.
               Inputs begin and end at multiples of 32, if the matrix does not end before
    shared_by  how many are made of the same tensors
    first      its first input, of those that `read` knows
    """

    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]
    read: Callable[[Rows, slice], Any]
    grouping: Grouping | None = None
    encoding: str = "F32"
    is_quantized: bool = True
    shared_by: int = 1
    first: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts) // self.shared_by

    def groups(self, rows: Rows) -> Groups:
        found: Groups = self._read(rows)
        return found

    def whole(self, rows: Rows) -> NDArray[Any]:
        found: NDArray[Any] | Groups = self._read(rows)
        if isinstance(found, Groups):
            assert self.grouping is not None
            return found.dequantize(self.grouping)
        return found

    def _read(self, rows: Rows) -> Any:
        return self.read(rows, slice(self.first, self.first + self.shape[-1]))

    def blocks(self, rows: Rows) -> None:
        return None

    def columns(self, part: slice) -> StoredTensor:
        size = INT4.group
        start, stop = part.start // size * size, min(-(-part.stop // size) * size, self.shape[1])
        cut = replace(self, shape=(self.shape[0], stop - start), first=self.first + start)
        if (grouping := self.grouping) is not None and (start % grouping.group or stop % grouping.group):
            cut = replace(cut, grouping=None)
        inner = slice(part.start - start, part.stop - start)
        return cut if inner == slice(0, stop - start) else StoredColumns(cut, inner)

    def release(self) -> None:
        for part in self.parts:
            part.release()


def quantization_method(config: object) -> str | None:
    """The name of the format; None without a configuration. Raises CheckpointError for one that is not supported."""
    if config is None:
        return None
    if not isinstance(config, dict):
        raise CheckpointError(f"config.json: quantization_config must be an object, not {quoted(repr(config))}")
    method = config.get("quant_method", COMPRESSED if "config_groups" in config else None)
    if method is None:
        raise CheckpointError("config.json: quantization_config names no quant_method")
    if method in _FP8_METHODS:
        return FP8
    if method not in (*SUPPORTED, GGUF):
        raise CheckpointError(
            f"config.json: quantization_config: weights in {quoted(method)} are not supported; supported:"
            f" {', '.join(SUPPORTED)}"
        )
    return str(method)


def with_quantized(tensors: dict[str, StoredTensor], config: object) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with a matrix NAME.weight in place of those that encode it.

    Raises CheckpointError for a format, or a variant of one, that is not supported.
    """
    method = quantization_method(config)
    if method is None or method == GGUF:
        return tensors
    assert isinstance(config, dict)
    source = _Source(tensors, config)
    return _scaled(_decoded(source, method))


def _scaled(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The same tensors. Raises CheckpointError for float8 weights without a scale: by themselves they mean nothing."""
    for name, stored in tensors.items():
        if stored.encoding.startswith("F8_"):
            raise CheckpointError(f"tensor {quoted(name)} is stored as {stored.encoding}, but its scale is missing")
    return tensors


def _decoded(source: _Source, method: str) -> dict[str, StoredTensor]:
    config = source.config
    match method:
        case "awq":
            source.require("version", config.get("version", "gemm"), "gemm", "GEMM")
            source.require("bits", config.get("bits", config.get("w_bit")), 4)
            return source.replaced(".qweight", _awq, (".qweight", ".qzeros", ".scales"))
        case "gptq":
            source.require("bits", config.get("bits"), 4, 8)
            source.require("checkpoint_format", config.get("checkpoint_format", "gptq"), "gptq", "gptq_v2")
            return source.replaced(".qweight", _gptq, (".qweight", ".qzeros", ".scales", ".g_idx"))
        case "fp8":
            suffix = ".weight_scale_inv" if config.get("weight_block_size") else ".weight_scale"
            return source.replaced(suffix, _fp8, (".weight", suffix, ".input_scale", ".activation_scale"))
        case "mxfp4":
            return _mxfp4(source)
    form = config.get("format", "")
    source.require("format", form, *_COMPRESSED_FORMATS)
    source.require("transform_config", config.get("transform_config") or None, None)
    if form == "pack-quantized":
        parts = ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"
        return source.replaced(".weight_packed", _packed, parts)
    parts = ".weight", ".weight_scale", ".weight_zero_point", ".input_scale", ".input_zero_point"
    return source.replaced(".weight_scale", _compressed, parts)


class _Source:
    """The tensors of a checkpoint and its configuration, with errors that name what is wrong."""

    def __init__(self, tensors: dict[str, StoredTensor], config: dict[str, Any]) -> None:
        self._tensors, self.config = tensors, config

    def replaced(
        self, marker: str, make: Callable[[_Source, str], StoredQuantized], suffixes: tuple[str, ...]
    ) -> dict[str, StoredTensor]:
        """The tensors, with one made by `make` for each module whose name, with the marker, is that of a tensor."""
        modules = self.modules(marker)
        made: dict[str, StoredTensor] = {f"{module}.weight": make(self, module) for module in modules}
        return self.without(module + suffix for module in modules for suffix in suffixes) | made

    def modules(self, marker: str) -> list[str]:
        """The names of tensors that end in this, without it."""
        return [name.removesuffix(marker) for name in self._tensors if name.endswith(marker)]

    def without(self, names: Iterable[str]) -> dict[str, StoredTensor]:
        gone = set(names)
        return {name: stored for name, stored in self._tensors.items() if name not in gone}

    def stored(self, name: str, *encodings: str) -> StoredTensor:
        """A tensor in one of these encodings."""
        if name not in self._tensors:
            raise CheckpointError(f"tensor {quoted(name)} is missing")
        stored = self._tensors[name]
        if stored.encoding not in encodings:
            raise CheckpointError(f"tensor {quoted(name)} is stored as {stored.encoding}, not {' or '.join(encodings)}")
        return stored

    def matrix(self, name: str, *encodings: str) -> StoredTensor:
        stored = self.stored(name, *encodings)
        if len(stored.shape) != 2:
            raise CheckpointError(f"tensor {quoted(name)} has shape {list(stored.shape)}, which is no matrix's")
        return stored

    def has(self, name: str) -> bool:
        return name in self._tensors

    def array(self, name: str, *encodings: str) -> NDArray[Any]:
        """Its values; bfloat16 widened to float32."""
        stored = self.stored(name, *encodings)
        values = stored.whole(slice(None))
        return widened(values) if stored.encoding == "BF16" else values

    def require(self, what: str, value: object, *allowed: object) -> None:
        if not any(type(value) is type(each) and value == each for each in allowed):  # 4.0 bits could not be counted
            raise CheckpointError(
                f"config.json: quantization_config: {what} {quoted(value)} is not supported;"
                f" supported: {', '.join(map(str, allowed))}"
            )


_FLOATS = "F32", "F16", "BF16"


def _elements(stored: StoredTensor, rows: Rows, columns: Rows) -> NDArray[Any]:
    """Some elements of a matrix, of whose file nothing else is read. Rows or columns, or both, are a slice."""
    found: NDArray[Any] = stored.whole(slice(None))[rows, columns]
    return found


def _awq(source: _Source, module: str) -> StoredQuantized:
    """qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out]: (code - zero) * scale."""
    codes, zeros = source.matrix(f"{module}.qweight", "I32"), source.array(f"{module}.qzeros", "I32")
    scales = source.array(f"{module}.scales", *_FLOATS)
    in_size, out_size = codes.shape[0], 8 * codes.shape[1]
    group = _group(module, in_size, scales, (-1, out_size), zeros, out_size // 8)

    def read(rows: Rows, inputs: slice) -> Groups:
        index = np.arange(out_size)[rows]
        words, place = np.unique(index // 8, return_inverse=True)
        shifts = _AWQ_SHIFTS[index % 8]

        def unpacked(found: NDArray[Any]) -> NDArray[np.uint8]:
            """[rows, …], the codes in these words."""
            of_row: NDArray[np.uint8] = (found.view(np.uint32)[:, place] >> shifts & 15).astype(np.uint8)
            return of_row.T

        groups = _groups(inputs, group)
        scale = scales[:, index][groups].T.astype(np.float32)
        return _four_bits(unpacked(_elements(codes, inputs, words)), scale, unpacked(zeros[:, words][groups]))

    return StoredQuantized((out_size, in_size), (codes,), read, INT4)


def _gptq(source: _Source, module: str) -> StoredQuantized:
    """qweight int32 [in / 8, out], qzeros int32 [groups, out / 8], scales [groups, out], g_idx [in], in 4 bits.

    An element is (code - zero) * scale of the group that g_idx gives to its input. The first version of the format
    stores zero - 1. Groups whose inputs are not neighbours (act-order) do not fit ours: their weights are read whole.
    """
    bits = source.config["bits"]
    codes, zeros = source.matrix(f"{module}.qweight", "I32"), source.array(f"{module}.qzeros", "I32")
    scales = source.array(f"{module}.scales", *_FLOATS)
    in_size, out_size = codes.shape[0] * 32 // bits, codes.shape[1]
    group = _group(module, in_size, scales, (-1, out_size), zeros, out_size * bits // 32)
    group_of_input = np.arange(in_size) // group
    is_in_order = True
    if source.has(f"{module}.g_idx"):
        given = source.array(f"{module}.g_idx", "I32")
        is_in_order = np.array_equal(given, group_of_input)
        group_of_input = given
        if given.shape != (in_size,) or given.min(initial=0) < 0 or given.max(initial=0) >= len(scales):
            raise CheckpointError(f"tensor {quoted(module)}.g_idx names groups that do not exist")
    elif source.config.get("desc_act") and len(scales) > 1:
        raise CheckpointError(f"tensor {quoted(module)}.g_idx is missing, but desc_act is set")
    first_version = source.config.get("checkpoint_format", "gptq") == "gptq"
    unpacked_zeros = _unpacked(zeros, bits).astype(np.int32) + first_version

    def read(rows: Rows, inputs: slice) -> Groups | NDArray[np.float32]:
        values = _unpacked(_elements(codes, _words(inputs, bits), rows).T, bits)
        groups = _groups(inputs, group) if is_in_order else group_of_input[inputs]
        scale, zero = scales[:, rows][groups].T.astype(np.float32), unpacked_zeros[:, rows][groups].T
        if not is_in_order:
            found: NDArray[np.float32] = ((values - zero) * scale).astype(np.float32)
            return found
        return _four_bits(values, scale, zero) if bits == 4 else _eight_bits(values, scale, zero)

    grouping = (INT4 if bits == 4 else Grouping(8, has_minimum=True)) if is_in_order else None
    return StoredQuantized((out_size, in_size), (codes,), read, grouping)


def _packed(source: _Source, module: str) -> StoredQuantized:
    """weight_packed int32 [out, in / 8], weight_scale [out, groups], weight_zero_point int32 [out / 8, groups]."""
    words, scales = source.matrix(f"{module}.weight_packed", "I32"), source.array(f"{module}.weight_scale", *_FLOATS)
    shape = source.array(f"{module}.weight_shape", "I64", "I32")
    out_size, in_size = (int(size) for size in shape) if shape.shape == (2,) else (0, 0)
    if words.shape[0] != out_size or not in_size:
        raise CheckpointError(
            f"tensor {quoted(module)}.weight_packed has shape {list(words.shape)}, not that of its shape"
        )
    if source.has(f"{module}.weight_g_idx"):
        raise CheckpointError(
            f"tensor {quoted(module)}.weight_g_idx: groups in the order of activations are not supported"
        )
    bits = 32 * words.shape[1] // in_size
    source.require("weights of as many bits as", bits, 4, 8)
    group = _group(module, in_size, scales.T, (-1, out_size))
    zeros = np.full(scales.shape, 1 << bits - 1, np.int32)
    if source.has(f"{module}.weight_zero_point"):
        packed = source.array(f"{module}.weight_zero_point", "I32")
        if packed.shape != (-(-out_size * bits // 32), scales.shape[1]):
            raise CheckpointError(
                f"tensor {quoted(module)}.weight_zero_point does not fit the scales' {list(scales.shape)}"
            )
        zeros = _unpacked(packed.T, bits).T[:out_size].astype(np.int32)

    def read(rows: Rows, inputs: slice) -> Groups:
        values = _unpacked(_elements(words, rows, _words(inputs, bits)), bits)
        groups = _groups(inputs, group)
        scale = scales[rows][:, groups].astype(np.float32)
        return (_four_bits if bits == 4 else _eight_bits)(values, scale, zeros[rows][:, groups])

    grouping = INT4 if bits == 4 else Grouping(8, has_minimum=True)
    return StoredQuantized((out_size, in_size), (words,), read, grouping)


def _words(inputs: slice, bits: int) -> slice:
    """The words of 32 bits that hold the codes of some inputs."""
    return slice(inputs.start * bits // 32, inputs.stop * bits // 32)


def _unpacked(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """[rows, codes], from words [rows, words] whose first code is in the lowest bits."""
    shifts, mask = np.arange(0, 32, bits, dtype=np.uint32), np.uint32((1 << bits) - 1)
    return (words.view(np.uint32)[..., None] >> shifts & mask).astype(np.uint8).reshape(len(words), -1)


# The projections whose rows alternate in each tensor of the experts.
_MXFP4_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def _mxfp4(source: _Source) -> dict[str, StoredTensor]:
    """The experts of GPT-OSS, each projection of each of them as a matrix of its own.

    NAME_blocks is uint8 [experts, out, groups, 16], the even one of two neighbours in low bits, NAME_scales uint8
    [experts, out, groups], exponents, and NAME_bias [experts, out]. Rows of gate and up lie in turn.
    """
    made: dict[str, StoredTensor] = {}
    modules = source.modules("_blocks")
    for module in modules:
        experts, _, kind = module.rpartition(".")
        if kind not in _MXFP4_PROJECTIONS:
            raise CheckpointError(f"tensor {quoted(module)}_blocks: only experts are supported in mxfp4")
        blocks, scales = source.stored(f"{module}_blocks", "U8"), source.stored(f"{module}_scales", "U8")
        if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
            raise CheckpointError(
                f"tensor {quoted(module)}_blocks has shape {list(blocks.shape)}, and its scales {list(scales.shape)}"
            )
        bias = source.stored(f"{module}_bias", *_FLOATS) if source.has(f"{module}_bias") else None
        if bias is not None and bias.shape != blocks.shape[:2]:
            raise CheckpointError(f"tensor {quoted(module)}_bias has shape {list(bias.shape)}, not that of its weight")
        projections = _MXFP4_PROJECTIONS[kind]
        for expert in range(blocks.shape[0]):
            for first, projection in enumerate(projections):
                name, turn = f"{experts}.{expert}.{projection}", slice(first, None, len(projections))
                parts = StoredPart(blocks, expert), StoredPart(scales, expert)
                made[f"{name}.weight"] = _mxfp4_rows(*parts, turn)
                if bias is not None:
                    made[f"{name}.bias"] = _bias_rows(StoredPart(bias, expert), turn)
    return source.without(module + suffix for module in modules for suffix in ("_blocks", "_scales", "_bias")) | made


def _mxfp4_rows(blocks: StoredPart, scales: StoredPart, turn: slice) -> StoredQuantized:
    """Rows that lie in turn with others, of codes [out, groups, 16] and exponents [out, groups]."""
    order = np.arange(blocks.shape[0])[turn]

    def read(rows: Rows, inputs: slice) -> Groups:
        groups = slice(inputs.start // INT4.group, inputs.stop // INT4.group)
        pairs = _elements(blocks, order[rows], groups)
        codes = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(len(pairs), -1, 2, INT4.group // 2)
        # Twice a code's value is in the table, hence a half.
        exponents = powers_of_two(_elements(scales, order[rows], groups), -128)
        return Groups(codes[..., 0, :] | codes[..., 1, :] << 4, exponents)

    shape = len(order), INT4.group * blocks.shape[1]
    return StoredQuantized(shape, (blocks, scales), read, Grouping(4, table=MXFP4_VALUES), shared_by=turn.step)


def _bias_rows(bias: StoredPart, turn: slice) -> StoredQuantized:
    order = np.arange(bias.shape[0])[turn]

    def read(rows: Rows, _: slice) -> NDArray[np.float32]:
        values = bias.whole(order[rows])
        return widened(values) if bias.encoding == "BF16" else values.astype(np.float32)

    return StoredQuantized((len(order),), (bias,), read, is_quantized=False, shared_by=turn.step)


def _compressed(source: _Source, module: str) -> StoredQuantized:
    """weight in int8 or float8 [out, in] and weight_scale [out, 1] or [1]."""
    stored, scales = source.matrix(f"{module}.weight", "I8", "F8_E4M3"), _scales_of_rows(source, module, "weight_scale")
    if stored.encoding == "F8_E4M3":
        return _float8(stored, stored.shape[1], lambda rows: scales[rows])
    in_size = stored.shape[1]
    if source.has(f"{module}.weight_zero_point") and source.array(f"{module}.weight_zero_point", "I8").any():
        raise CheckpointError(
            f"tensor {quoted(module)}.weight_zero_point: int8 weights with a zero point are not supported"
        )
    if in_size % 32:
        raise CheckpointError(f"tensor {quoted(module)}.weight has {in_size} inputs, which is no multiple of 32")

    def read(rows: Rows, inputs: slice) -> Groups:
        values = _elements(stored, rows, inputs)
        repeated = np.repeat(scales[rows].astype(np.float16), values.shape[1] // 32, axis=1)
        return Groups(values.reshape(len(values), -1, 32), repeated)

    return StoredQuantized(stored.shape, (stored,), read, Grouping(8))


def _fp8(source: _Source, module: str) -> StoredQuantized:
    """weight in float8 [out, in], and a factor of each block of inputs and outputs, of each output, or of all."""
    stored = source.matrix(f"{module}.weight", "F8_E4M3")
    if not source.config.get("weight_block_size"):
        scales = _scales_of_rows(source, module, "weight_scale")
        return _float8(stored, stored.shape[1], lambda rows: scales[rows])
    match source.config["weight_block_size"]:
        case [int(height), int(width)] if height > 0 and width > 0:
            pass
        case size:
            raise CheckpointError(
                f"config.json: quantization_config: weight_block_size {quoted(size)} is not supported; two positive"
                " integers are"
            )
    blocks = source.array(f"{module}.weight_scale_inv", *_FLOATS)
    out_size, in_size = stored.shape
    if blocks.shape != (-(-out_size // height), -(-in_size // width)):
        raise CheckpointError(
            f"tensor {quoted(module)}.weight_scale_inv has shape {list(blocks.shape)}, not one for each block"
        )
    return _float8(stored, width, lambda rows: blocks[np.arange(out_size)[rows] // height])


def _float8(stored: StoredTensor, group: int, factors: Callable[[Rows], NDArray[Any]]) -> StoredQuantized:
    """A matrix whose rows have a factor for each group of inputs, the last of which may have fewer."""
    in_size = stored.shape[1]
    is_grouped = group == in_size or in_size % group == group % INT4.group == 0

    def read(rows: Rows, inputs: slice) -> Groups | NDArray[np.float32]:
        values, scales = _elements(stored, rows, inputs), factors(rows).astype(np.float32)
        if is_grouped and not (inputs.start % group or inputs.stop % group):
            of_groups = scales[:, inputs.start // group : inputs.stop // group]
            return Groups(values.reshape(len(values), -1, group), of_groups)
        found: NDArray[np.float32] = FLOAT8_VALUES[values] * scales[:, np.arange(inputs.start, inputs.stop) // group]
        return found

    grouping = Grouping(8, group, is_float=True) if is_grouped else None
    return StoredQuantized(stored.shape, (stored,), read, grouping)


def _scales_of_rows(source: _Source, module: str, name: str) -> NDArray[Any]:
    """[out, 1], from a scale for each output or one for all."""
    scales = source.array(f"{module}.{name}", *_FLOATS)
    out_size = source.matrix(f"{module}.weight", "I8", "F8_E4M3").shape[0]
    if scales.size != 1 and scales.shape not in ((out_size,), (out_size, 1)):  # others are scales of groups or blocks
        raise CheckpointError(
            f"tensor {quoted(module)}.{name} has shape {list(scales.shape)}, not one value for each output"
        )
    return np.broadcast_to(scales.reshape(-1, 1), (out_size, 1))


def _group(
    module: str,
    in_size: int,
    scales: NDArray[Any],
    shape: tuple[int, int],
    zeros: NDArray[Any] | None = None,
    width: int = 0,
) -> int:
    """How many inputs share a scale in the file. Raises CheckpointError if these are not whole groups of ours."""
    groups = scales.shape[0] if scales.ndim else 0
    if scales.shape != (groups, shape[1]) or (zeros is not None and zeros.shape != (groups, width)):
        raise CheckpointError(f"{quoted(module)}: its scales and zeros have other shapes than its weight")
    if not groups or in_size % groups or in_size // groups % INT4.group:
        raise CheckpointError(
            f"{quoted(module)}: {in_size} inputs have {groups} groups;"
            f" groups of a multiple of {INT4.group} are supported"
        )
    return in_size // groups


def _groups(inputs: slice, group: int) -> NDArray[np.intp]:
    """For each group of ours in some inputs, the number of the file's group, of `group` inputs, that it is part of."""
    return np.arange(inputs.start, inputs.stop, INT4.group) // group


def _four_bits(codes: NDArray[np.uint8], scales: NDArray[Any], zeros: NDArray[Any]) -> Groups:
    """(code - zero) * scale, from codes [rows, in], and scales and zeros [rows, groups]."""
    halves = codes.reshape(len(codes), -1, 2, INT4.group // 2)
    return Groups(halves[..., 0, :] | halves[..., 1, :] << 4, *_scales_and_minimums(scales, zeros))


def _eight_bits(codes: NDArray[np.uint8], scales: NDArray[Any], zeros: NDArray[Any]) -> Groups:
    values = (codes ^ 128).view(np.int8).reshape(len(codes), -1, INT4.group)  # code - 128
    return Groups(values, *_scales_and_minimums(scales, zeros.astype(np.int32) - 128))


def _scales_and_minimums(scales: NDArray[Any], zeros: NDArray[Any]) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    with np.errstate(over="ignore"):
        rounded = scales.astype(np.float16)
        minimums = (-zeros.astype(np.float32) * rounded.astype(np.float32)).astype(np.float16)
    return rounded, minimums
