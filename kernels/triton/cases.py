"""The calls that the compile gate and the tuning command make: every op, at the shapes of models that are served.

The ops are called as the model calls them, so what is compiled is what is launched. Tensors are of the meta device:
they have a shape and a type, and no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton.rms_norm import rms_norm_triton
from kernels.triton.silu_and_mul import silu_and_mul_triton


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    vocab_size: int


LLAMA_8B = ModelShape("llama-3.1-8b", 32, 8, 128, 4096, 14336, 128256)
LLAMA_1B = ModelShape("llama-3.2-1b", 32, 8, 64, 2048, 8192, 128256)
SMOLLM2 = ModelShape("smollm2-135m", 9, 3, 64, 576, 1536, 49152)
MODELS = (LLAMA_8B, LLAMA_1B, SMOLLM2)


@dataclass(frozen=True, slots=True)
class Case:
    """
    call    launches an op
    narrow  kernels of it that need not move 16 bytes at a time: what they read is small
    """

    name: str
    call: Callable[[], object]
    narrow: frozenset[str] = frozenset()


def cases() -> list[Case]:
    return [case for model in MODELS for case in _of_model(model, torch.bfloat16)]


def _of_model(model: ModelShape, dtype: torch.dtype) -> Iterator[Case]:
    name = f"{model.name} {str(dtype).removeprefix('torch.')}"
    rows = 32
    x, weight = _empty(rows, model.hidden_size, dtype=dtype), _empty(model.hidden_size, dtype=dtype)
    yield Case(f"{name} rms_norm", lambda: rms_norm_triton(x, weight, 1e-5, x))
    gate_up = _empty(rows, 2 * model.ffn_size, dtype=dtype)
    yield Case(f"{name} silu_and_mul", lambda: silu_and_mul_triton(gate_up))


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
