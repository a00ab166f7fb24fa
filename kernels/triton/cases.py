"""The calls that the compile gate makes: every op as a model calls it, so that what is compiled is what is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.triton.inputs import (
    LLAMA_1B,
    LLAMA_8B,
    SMOLLM2,
    ModelShape,
    attention_plan,
    normal,
    random_pages,
)
from kernels.triton.paged_attention import paged_attention_triton
from kernels.triton.rms_norm import rms_norm_triton
from kernels.triton.silu_and_mul import silu_and_mul_triton

META = torch.device("meta")
ROWS = 24  # no multiple of 16: kernels must not depend on how many rows there are


@dataclass(frozen=True, slots=True)
class Case:
    """
    call    launches an op on tensors of the meta device
    narrow  kernels of it that need not move 16 bytes at a time: what they read is small
    """

    name: str
    call: Callable[[], object]
    narrow: frozenset[str] = frozenset()


def cases() -> list[Case]:
    found: list[Case] = []
    for model in (LLAMA_8B, LLAMA_1B, SMOLLM2):
        found += layer_cases(model, torch.bfloat16)
        found += attention_cases(model, torch.bfloat16, torch.bfloat16)
    found += attention_cases(LLAMA_8B, torch.bfloat16, torch.float8_e4m3fn)
    return found


def layer_cases(model: ModelShape, dtype: torch.dtype) -> Iterator[Case]:
    x = normal(ROWS, model.hidden_size, dtype=dtype, device=META)
    weight = normal(model.hidden_size, dtype=dtype, device=META)
    gate_up = normal(ROWS, 2 * model.ffn_size, dtype=dtype, device=META)
    yield Case(f"{model.name} rms_norm", lambda: rms_norm_triton(x, weight, 1e-5))
    yield Case(f"{model.name} rms_norm of a sum", lambda: rms_norm_triton(x, weight, 1e-5, x))
    yield Case(f"{model.name} silu_and_mul", lambda: silu_and_mul_triton(gate_up))


def attention_cases(model: ModelShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> Iterator[Case]:
    pages = random_pages(model, ROWS, 1024, kv_dtype, META)
    name = f"{model.name} {_name(kv_dtype)} pages"
    q = normal(ROWS, model.num_heads, model.head_dim, dtype=dtype, device=META)
    decode, prefill = attention_plan(ROWS, 1024, 1, META), attention_plan(1, 1024, ROWS, META)
    yield Case(f"{name} decode", lambda: paged_attention_triton(q, pages, decode), frozenset({"_merge_splits"}))
    yield Case(f"{name} prefill", lambda: paged_attention_triton(q, pages, prefill))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
