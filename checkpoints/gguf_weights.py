"""GGUF tensors → bfloat16 safetensors: renamed, rotary rows reordered, dequantised a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from checkpoints.errors import CheckpointError
from checkpoints.gguf_config import FAMILIES, ROPE_FACTORS, ModelShape
from checkpoints.gguf_file import GgufFile
from checkpoints.progress import Progress
from checkpoints.safetensors_file import SafetensorsWriter, TensorEntry

VALUES_AT_ONCE = 1 << 22

_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def write_weights(file: GgufFile, shape: ModelShape, target: Path, progress: Progress) -> None:
    """Writes every tensor of the model to one safetensors file, rounded to the nearest bfloat16, ties to even.

    Raises CheckpointError for a missing or unknown tensor, an unsupported quantisation, or values that are not finite.
    """
    names = _tensor_names(shape)
    _check_names(file, names)
    entries = [TensorEntry(hf, "BF16", _shape_of(file.tensors[name]), 2) for name, hf in names.items()]
    total = sum(entry.num_bytes for entry in entries)
    done = 0
    with SafetensorsWriter(target, entries) as writer:
        for name in names:
            for values in _values(file, name, shape):
                writer.write(to_bfloat16(values, name))
                done += 2 * values.size
                progress("Converting the weights", done, total)


def _tensor_names(shape: ModelShape) -> dict[str, str]:
    """GGUF name → name in the checkpoint, for every tensor that a model of this shape has."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not shape.tied_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(shape.num_layers):
        for ours, theirs in (_PROJECTIONS | _NORMS | (_QK_NORMS if FAMILIES[shape.family].qk_norm else {})).items():
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
        raise CheckpointError(f"{file.name} has {len(unknown)} tensors foreign to its architecture, first {unknown[0]}")


def _shape_of(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # a GGUF names the fastest dimension first


def _values(file: GgufFile, name: str, shape: ModelShape) -> Iterator[NDArray[np.float32]]:
    """A tensor's values in order, in pieces of whole rows."""
    tensor = file.tensors[name]
    rows = tensor.data.reshape(-1, tensor.data.shape[-1]) if tensor.data.ndim > 1 else tensor.data[:, None]
    order = _row_order(name, len(rows), shape, file.name)
    step = max(1, VALUES_AT_ONCE * len(rows) // max(1, tensor.n_elements))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step] if order is None else rows[order[start : start + step]]
        try:
            yield dequantize(np.ascontiguousarray(piece), tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise CheckpointError(f"{file.name}: {name} is quantised as {kind}, which is not supported") from error


def _row_order(name: str, num_rows: int, shape: ModelShape, file_name: str) -> NDArray[np.intp] | None:
    """For each row of Q or K in the checkpoint, the row of the GGUF that holds it; None where they agree.

    The GGUF pairs rows 2i and 2i + 1 of a head for the rotary embedding; a checkpoint pairs i and i + head_dim / 2.
    """
    heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}.get(name.split(".")[-2])
    if heads is None or not FAMILIES[shape.family].interleaved_rotary:
        return None
    if num_rows != heads * shape.head_dim:
        raise CheckpointError(f"{file_name}: {name} has {num_rows} rows, not {heads} heads of {shape.head_dim}")
    return np.arange(num_rows).reshape(heads, shape.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def to_bfloat16(values: NDArray[np.float32], name: str) -> NDArray[np.uint16]:
    """The bit patterns of the nearest bfloat16 values, ties to even.

    Raises CheckpointError that names the tensor if a value is not finite.
    """
    if not math.isfinite(float(np.abs(values).max(initial=0.0))):
        raise CheckpointError(f"{name} has values that are not finite: the file is corrupt")
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    return rounded.astype(np.uint16)
