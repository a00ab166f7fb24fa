"""Reads LoRA adapters as llama.cpp's conversion writes them: a GGUF file with two tensors for each matrix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .adapters import (
    STORED,
    AdapterFile,
    AdapterLimits,
    AdapterPair,
    Rest,
    checked,
    identity_of,
    no_rest,
    not_empty,
    read_whole,
)
from .folder import CheckpointError, quoted
from .gguf_families import FAMILIES, Family
from .gguf_file import GgufFile, GgufTensor
from .mapped_file import HeldFile

_TENSOR = re.compile(r"blk\.(\d{1,4})\.([a-z_]{1,64})\.weight\.(lora_[ab])")


def read_gguf_adapter(path: Path, limits: AdapterLimits, rest: Rest = no_rest) -> AdapterFile:
    """Read a .gguf file.

    Raises AdapterNotFound, or CheckpointError for what is broken, not supported, or does not fit the model.
    """
    content = read_whole(path, limits.most_bytes, rest)
    file = GgufFile(path, HeldFile(content), most_tensors=2 * len(limits.modules))
    family, alpha = _described(file)
    halves: dict[tuple[str, str], dict[str, NDArray[Any]]] = {}
    for tensor in file.tensors.values():
        module, stem, half = _place(tensor, family)
        halves.setdefault((module, stem), {})[half] = _stored(tensor)
    pairs: dict[str, AdapterPair] = {}
    for (module, stem), found in halves.items():
        if len(found) < 2:
            raise CheckpointError(f"{quoted(module)} has only {next(iter(found))} of lora_a and lora_b")
        down, up = found["lora_a"], found["lora_b"]
        pair = checked(module, down, up, alpha / len(down) if alpha else 1.0, limits)
        order = _row_order(stem, len(up), limits.head_dim, family)
        pairs[module] = pair if order is None else replace(pair, up=up[order])
        rest()
    return AdapterFile(identity_of(content, rest=rest), not_empty(pairs))


def _described(file: GgufFile) -> tuple[Family, float]:
    """The family whose names the tensors have, and α; 0: the adapter is not scaled."""
    kind, method = file.text("general.type", ""), file.text("adapter.type", "")
    if (kind, method) != ("adapter", "lora"):
        raise CheckpointError(f"{file.name} is not a LoRA adapter: it is of type {quoted(kind)} {quoted(method)}")
    if file.architecture not in FAMILIES:
        raise CheckpointError(f"{file.name}: architecture {quoted(file.architecture)} is not supported")
    alpha = file.number("adapter.lora.alpha", 0.0)
    if unread := file.unread("adapter."):
        raise CheckpointError(f"{file.name} has the field {quoted(next(iter(unread)))}, which is not supported")
    return FAMILIES[file.architecture], alpha


def _place(tensor: GgufTensor, family: Family) -> tuple[str, str, str]:
    """The checkpoint's name of a tensor's module, the GGUF's name of it in its layer, and which of its two it is."""
    names: Mapping[str, str] = {**family.tensors, **family.mlp}
    match = _TENSOR.fullmatch(tensor.name)
    if match is None or match[2] not in names:
        raise CheckpointError(f"tensor {quoted(tensor.name)} is not supported: adapters change matrices of layers")
    return f"{family.names.layers}.{int(match[1])}.{names[match[2]]}", match[2], match[3]


def _stored(tensor: GgufTensor) -> NDArray[Any]:
    if tensor.kind not in STORED or len(tensor.shape) != 2:
        wanted = f"a matrix in {', '.join(STORED)} is needed"
        raise CheckpointError(f"tensor {quoted(tensor.name)} has {list(tensor.shape)} in {tensor.kind}; {wanted}")
    return np.ascontiguousarray(tensor.data).view(STORED[tensor.kind]).reshape(tensor.shape)


def _row_order(stem: str, rows: int, head_dim: int, family: Family) -> NDArray[np.intp] | None:
    """For each output in the checkpoint, the file's; None if the orders agree. The rows of the model's weights are
    in the same order (gguf_weights.py)."""
    if family.is_permuted and stem in ("attn_q", "attn_k"):
        return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
    if family.has_qkv_by_head and stem == "attn_qkv":
        return np.arange(rows).reshape(3, -1, head_dim).swapaxes(0, 1).reshape(-1)
    return None
