"""The tensors of a GGUF file by the names of a Hugging Face checkpoint, read from the mapped file some rows at a time.

Matrices in the formats of gguf_blocks.py keep their values. Those in other quantizations are dequantized to float32,
and so are vectors; matrices in F32, F16 and BF16 are what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .folder import CheckpointError, quoted
from .gguf_blocks import READERS
from .gguf_config import FAMILIES, ROPE_FACTORS, ModelShape, read_shape
from .gguf_file import TENSOR_TYPES, GgufFile, GgufTensor
from .stored import Grouping, Groups, Rows, widened

_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_BLOCK_BYTES = {kind: num_bytes for kind, _, num_bytes in TENSOR_TYPES.values()}
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
            values = self._values(self.tensor.data).reshape(-1)
            return values[rows if self.order is None else self.order[rows]] - np.float32(self.offset)
        encoded = self._encoded(rows)
        kind = self.tensor.kind
        return encoded.view(_WHOLE[kind]) if kind in _WHOLE else self._values(encoded)

    def release(self) -> None:
        self.file.mapped.release(self.tensor.data)

    def _encoded(self, rows: Rows) -> NDArray[np.uint8]:
        return self.tensor.data[rows if self.order is None else self.order[rows]]

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
        return encoded.reshape(len(encoded), -1, _BLOCK_BYTES[self.tensor.kind])


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
    shape = read_shape(file)
    names = _tensor_names(shape)
    _check_names(file, names)
    for tensor in file.tensors.values():
        _check_kind(file, tensor)
    return {hf_name: _stored(file, file.tensors[name], shape) for name, hf_name in names.items()}


def _stored(file: GgufFile, tensor: GgufTensor, shape: ModelShape) -> StoredGguf:
    family = FAMILIES[shape.family]
    is_norm = "norm" in tensor.name and len(tensor.shape) == 1
    return StoredGguf(file, tensor, _row_order(file, tensor, shape), family.norm_offset if is_norm else 0.0)


def _check_kind(file: GgufFile, tensor: GgufTensor) -> None:
    """Raise CheckpointError for a type that holds no weights, or that no reader here supports."""
    kind = tensor.kind
    if kind in _WHOLE or kind in READERS:
        return
    import gguf

    try:
        gguf.quants.dequantize(tensor.data[:1, : _BLOCK_BYTES[kind]], gguf.GGMLQuantizationType[kind])
    except (NotImplementedError, KeyError) as error:
        message = f"{file.name}: {quoted(tensor.name)} is quantized as {kind}, which is not supported"
        raise CheckpointError(message) from error


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


def _row_order(file: GgufFile, tensor: GgufTensor, shape: ModelShape) -> NDArray[np.intp] | None:
    """For each row of Q or K in the checkpoint, the GGUF's row that holds it; None if the orders agree.

    The GGUF pairs rows 2i and 2i + 1 of a head for the rotary embedding; a checkpoint pairs i and i + head_dim / 2.
    """
    heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}.get(tensor.name.split(".")[-2])
    if heads is None or not FAMILIES[shape.family].interleaved_rotary:
        return None
    if (num_rows := tensor.shape[0]) != heads * shape.head_dim:
        raise CheckpointError(f"{file.name}: {tensor.name} has {num_rows} rows, not {heads} heads of {shape.head_dim}")
    return np.arange(num_rows).reshape(heads, shape.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
