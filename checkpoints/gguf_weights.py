"""Converts GGUF tensors to safetensors a few rows at a time: renames them and reorders the rows of Q and K.

Matrices in Q4_0 and Q4_1 keep their values, in the format of checkpoints/grouped_weights.py. Vectors become float32,
which holds any format's values, and matrices in F32, F16 and BF16 stay what they are. Matrices in other quantizations
become float16: in as many bytes as bfloat16, it is eight times as close to their values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from .folder import CheckpointError, quoted
from .gguf_config import FAMILIES, ROPE_FACTORS, ModelShape
from .gguf_file import GgufFile
from .grouped_weights import GROUP_BYTES, MINIMUMS, SCALES, VALUES
from .progress import Progress
from .safetensors_file import SafetensorsWriter, TensorEntry

VALUES_AT_ONCE = 1 << 22
FLOAT16_MAX = 65_504
MAX_SCALE = 127  # of 4-bit weights: kernels keep scale · Σ(value - 8) of 64 weights in fp16, whose maximum is 65,504

_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_GROUPED = (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1)


def has_grouped_weights(file: GgufFile) -> bool:
    return any(_is_grouped(tensor) for tensor in file.tensors.values())


def write_weights(file: GgufFile, shape: ModelShape, target: Path, progress: Progress) -> None:
    """Write every tensor of the model to one safetensors file.

    Raises CheckpointError for a missing or unknown tensor, an unsupported quantization, or values that are not finite.
    """
    names = check_tensors(file, shape)
    entries = [entry for name, hf in names.items() for entry in _entries(file.tensors[name], hf)]
    total = sum(entry.num_bytes for entry in entries)
    done = 0
    with SafetensorsWriter(target, entries) as writer:
        for name in names:
            for piece in _pieces(file, name, shape):
                writer.write(piece)
                done += piece.nbytes
                progress("Converting the weights", done, total)


def check_tensors(file: GgufFile, shape: ModelShape) -> dict[str, str]:
    """The checkpoint's name of every tensor, by its GGUF name. Little of their data is read.

    Raises CheckpointError for a missing or unknown tensor, or an unsupported quantization.
    """
    names = _tensor_names(shape)
    _check_names(file, names)
    for tensor in {file.tensors[name].tensor_type: file.tensors[name] for name in reversed(names)}.values():
        _dequantized(tensor.data[:1] if tensor.data.ndim > 1 else tensor.data, tensor, file.name)
    return names


def _is_grouped(tensor: gguf.ReaderTensor) -> bool:
    return tensor.tensor_type in _GROUPED and len(tensor.shape) == 2


def _entries(tensor: gguf.ReaderTensor, name: str) -> list[TensorEntry]:
    shape = _shape_of(tensor)
    if not _is_grouped(tensor):
        dtype = _stored_dtype(tensor)
        return [TensorEntry(name, dtype, shape, _ELEMENT_BYTES[dtype])]
    groups = shape[0], shape[1] // gguf.GGML_QUANT_SIZES[tensor.tensor_type][0]
    return [
        TensorEntry(name + VALUES, "U8", (*groups, GROUP_BYTES), 1),
        TensorEntry(name + SCALES, "F16", groups, 2),
        TensorEntry(name + MINIMUMS, "F16", groups, 2),
    ]


def _stored_dtype(tensor: gguf.ReaderTensor) -> str:
    if len(tensor.shape) == 1 or tensor.tensor_type == gguf.GGMLQuantizationType.F32:
        return "F32"
    return "BF16" if tensor.tensor_type == gguf.GGMLQuantizationType.BF16 else "F16"


def _tensor_names(shape: ModelShape) -> dict[str, str]:
    """The checkpoint's name of every tensor of a model of this shape, keyed by its GGUF name."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not shape.tied_embeddings:
        names["output.weight"] = "lm_head.weight"
    weights = {**_PROJECTIONS, **FAMILIES[shape.family].norms}
    for layer in range(shape.num_layers):
        for ours, theirs in weights.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
        for projection in _biased_projections(shape):
            names[f"blk.{layer}.{projection}.bias"] = f"model.layers.{layer}.{_PROJECTIONS[projection]}.bias"
    return names


def _biased_projections(shape: ModelShape) -> list[str]:
    attention = ["attn_q", "attn_k", "attn_v"] if shape.qkv_bias else []
    if shape.qkv_bias and shape.family == "llama":  # its attention_bias covers the output projection too
        attention.append("attn_output")
    return attention + (["ffn_gate", "ffn_up", "ffn_down"] if shape.mlp_bias else [])


def _check_names(file: GgufFile, names: dict[str, str]) -> None:
    if missing := [name for name in names if name not in file.tensors]:
        raise CheckpointError(f"{file.name} lacks {len(missing)} of {len(names)} tensors, first {missing[0]}")
    if unknown := [name for name in file.tensors if name not in names and name != ROPE_FACTORS]:
        raise CheckpointError(
            f"{file.name} has {len(unknown)} tensors unknown to its architecture, first {quoted(unknown[0])}"
        )


def _shape_of(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # GGUF lists the fastest dimension first


def _pieces(file: GgufFile, name: str, shape: ModelShape) -> Iterator[NDArray[np.generic]]:
    """Yield a tensor's converted data, entry by entry, in pieces of whole rows."""
    tensor = file.tensors[name]
    if not _is_grouped(tensor):
        for rows in _rows(file, name, shape):
            yield _stored(_dequantized(rows, tensor, file.name), _stored_dtype(tensor), name)
        return
    for rows in _rows(file, name, shape):
        yield _blocks(rows, tensor)[..., -GROUP_BYTES:]
    for rows in _rows(file, name, shape):
        yield _scales_and_minimums(rows, tensor)[0]
    for rows in _rows(file, name, shape):
        yield _scales_and_minimums(rows, tensor)[1]


def _rows(file: GgufFile, name: str, shape: ModelShape) -> Iterator[NDArray[np.generic]]:
    """Yield a tensor's rows, as the file encodes them, in the checkpoint's order, several at a time."""
    tensor = file.tensors[name]
    # A vector has a row for each of its values, or for each of its blocks if it is quantized.
    row_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    width = tensor.data.shape[-1] if tensor.data.ndim > 1 else row_bytes // tensor.data.itemsize
    rows = tensor.data.reshape(-1, width)
    order = _row_order(name, len(rows), shape, file.name)
    step = max(1, VALUES_AT_ONCE * len(rows) // max(1, tensor.n_elements))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step] if order is None else rows[order[start : start + step]]
        yield np.ascontiguousarray(piece)


def _dequantized(rows: NDArray[np.generic], tensor: gguf.ReaderTensor, file_name: str) -> NDArray[np.float32]:
    kind = tensor.tensor_type
    try:
        return dequantize(rows, kind)
    except NotImplementedError as error:
        message = f"{file_name}: {tensor.name} is quantized as {kind.name}, which is not supported"
        raise CheckpointError(message) from error


def _blocks(rows: NDArray[np.generic], tensor: gguf.ReaderTensor) -> NDArray[np.generic]:
    """[rows, groups, bytes of a block]: a scale, a minimum (Q4_1 only), then the nibbles."""
    return rows.reshape(len(rows), -1, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1])


def _scales_and_minimums(
    rows: NDArray[np.generic], tensor: gguf.ReaderTensor
) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    header = np.ascontiguousarray(_blocks(rows, tensor)[..., :-GROUP_BYTES]).view(np.float16)
    scales = header[..., 0]
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        is_symmetric = tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0
        minimums = scales * np.float16(-8) if is_symmetric else header[..., 1]
    if not (np.isfinite(scales).all() and np.isfinite(minimums).all()):
        raise _not_finite(tensor.name)
    if (greatest := float(np.abs(scales).max(initial=0.0))) > MAX_SCALE:
        raise CheckpointError(f"{tensor.name} has a scale of {greatest:g}; at most {MAX_SCALE} is supported")
    return scales, minimums


def _row_order(name: str, num_rows: int, shape: ModelShape, file_name: str) -> NDArray[np.intp] | None:
    """For each row of Q or K in the checkpoint, the GGUF's row that holds it; None if the orders agree.

    The GGUF pairs rows 2i and 2i + 1 of a head for the rotary embedding; a checkpoint pairs i and i + head_dim / 2.
    """
    heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}.get(name.split(".")[-2])
    if heads is None or not FAMILIES[shape.family].interleaved_rotary:
        return None
    if num_rows != heads * shape.head_dim:
        raise CheckpointError(f"{file_name}: {name} has {num_rows} rows, not {heads} heads of {shape.head_dim}")
    return np.arange(num_rows).reshape(heads, shape.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _stored(values: NDArray[np.float32], dtype: str, name: str) -> NDArray[np.generic]:
    """Raises CheckpointError, which names the tensor, if a value is not finite, or is beyond float16's range."""
    greatest = float(np.abs(values).max(initial=0.0))
    if not math.isfinite(greatest):
        raise _not_finite(name)
    match dtype:
        case "F32":
            return values
        case "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)  # which they were: nothing is cut off
        case _:
            if greatest > FLOAT16_MAX:
                raise CheckpointError(f"{name} has a value of {greatest:g}; at most {FLOAT16_MAX} is supported")
            return values.astype(np.float16)


def _not_finite(name: str) -> CheckpointError:
    return CheckpointError(f"{name} has values that are not finite: the file is corrupt")
