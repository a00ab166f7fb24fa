"""The calls that the compile gate makes: every op as a model calls it, to compile what a model would launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pagoda_server.kernels.linear import Linear
from pagoda_server.kernels.rope_and_store_kv import HeadNorms
from pagoda_server.kernels.row_sampling import allocate_sampled
from pagoda_server.kernels.triton.inputs import (
    LLAMA_1B,
    LLAMA_8B,
    SMOLLM2,
    ModelShape,
    attention_plan,
    normal,
    random_pages,
    sampling_rows,
)
from pagoda_server.kernels.triton.linear_quantized import (
    gated_linear_fp8_weight_triton,
    gated_linear_int8_weight_triton,
    kernel_config,
    linear_fp8_weight_triton,
    linear_int8_weight_triton,
)
from pagoda_server.kernels.triton.paged_attention import paged_attention_triton
from pagoda_server.kernels.triton.product import Weight, multiply
from pagoda_server.kernels.triton.rms_norm import rms_norm_triton
from pagoda_server.kernels.triton.rope_and_store_kv import rope_and_store_kv_triton
from pagoda_server.kernels.triton.row_sampling import sample_rows_triton
from pagoda_server.kernels.triton.silu_and_mul import silu_and_mul_triton

META = torch.device("meta")
ROWS = 24  # not a multiple of 16, since compiled code must not depend on the number of rows


@dataclass(frozen=True, slots=True)
class Case:
    """A call of one op.

    call    launches the op on tensors of the meta device
    narrow  its kernels that need not move 16 bytes at a time, since they read little
    """

    name: str
    call: Callable[[], object]
    narrow: frozenset[str] = frozenset()


def cases() -> list[Case]:
    found: list[Case] = []
    for model in (LLAMA_8B, LLAMA_1B, SMOLLM2):
        found += layer_cases(model)
        found += attention_cases(model, torch.bfloat16, None)
    found += product_cases(LLAMA_8B, (1, ROWS, 50, 100, 1000))
    found += product_cases(SMOLLM2, (1, ROWS, 1000))
    found += split_cases(LLAMA_8B)
    found += attention_cases(LLAMA_8B, torch.float8_e4m3fn, None)
    found += attention_cases(LLAMA_8B, torch.bfloat16, sliding_window=512)
    found += sampling_cases(LLAMA_8B.vocab_size)
    return found


def layer_cases(model: ModelShape) -> Iterator[Case]:
    x, weight = _normal(ROWS, model.hidden_size), _normal(model.hidden_size)
    gate_up = _normal(ROWS, 2 * model.ffn_size)
    qkv = _normal(ROWS, model.num_heads + 2 * model.num_kv_heads, model.head_dim)
    cos, sin = torch.empty(2, 8192, model.head_dim // 2, device=META)
    positions = torch.empty(ROWS, dtype=torch.int64, device=META)
    slots = torch.empty(ROWS, dtype=torch.int64, device=META)
    norms = HeadNorms(_normal(model.head_dim), _normal(model.head_dim), 1e-6)
    pages = random_pages(model, 1, ROWS, torch.bfloat16, META)
    float8_pages = random_pages(model, 1, ROWS, torch.float8_e4m3fn, META)
    yield Case(f"{model.name} rms_norm", lambda: rms_norm_triton(x, weight, 1e-5))
    yield Case(f"{model.name} rms_norm of a sum", lambda: rms_norm_triton(x, weight, 1e-5, x))
    yield Case(f"{model.name} silu_and_mul", lambda: silu_and_mul_triton(gate_up))
    for name, kv, head_norms in (("", pages, None), (", head norms", pages, norms), (", float8", float8_pages, None)):
        call = partial(rope_and_store_kv_triton, qkv, cos, sin, slots, kv, head_norms, positions)
        yield Case(f"{model.name} rope{name}", call)


def attention_cases(model: ModelShape, kv_dtype: torch.dtype, sliding_window: int | None) -> Iterator[Case]:
    pages = random_pages(model, ROWS, 1024, kv_dtype, META)
    name = f"{model.name} {str(kv_dtype).removeprefix('torch.')} pages{', window' if sliding_window else ''}"
    q = _normal(ROWS, model.num_heads, model.head_dim)
    decode, prefill = (
        replace(plan, sliding_window=sliding_window)
        for plan in (attention_plan(ROWS, 1024, 1, META), attention_plan(1, 1024, ROWS, META))
    )
    yield Case(f"{name} decode", lambda: paged_attention_triton(q, pages, decode))
    yield Case(f"{name} prefill", lambda: paged_attention_triton(q, pages, prefill))


def product_cases(model: ModelShape, batches: tuple[int, ...]) -> Iterator[Case]:
    """Products with one weight; others differ only in the number of programs."""
    out_size, in_size = model.projections["down"]
    weight, bias = _normal(out_size, in_size), _normal(out_size)
    for rows in batches:
        x, gate_up = _normal(rows, in_size), _normal(rows, 2 * in_size)
        for kind, prepare, prepare_gated in (
            ("int8", linear_int8_weight_triton, gated_linear_int8_weight_triton),
            ("float8", linear_fp8_weight_triton, gated_linear_fp8_weight_triton),
        ):
            name = f"{model.name} {kind} weight, {rows} rows"
            yield Case(name, partial(_apply, prepare, weight, None, x))
            if model is LLAMA_8B and rows <= ROWS:
                yield Case(f"{name}, bias", partial(_apply, prepare, weight, bias, x))
                yield Case(f"{name}, gated", partial(_apply, prepare_gated, weight, None, gate_up))


def split_cases(model: ModelShape) -> Iterator[Case]:
    """A product whose input is split, as on GPUs with more processors than a weight has tiles."""
    out_size, in_size = model.projections["down"]
    values, scales = torch.empty(out_size, in_size, dtype=torch.int8, device=META), torch.empty(out_size, device=META)
    x, bias = _normal(1, in_size), _normal(out_size)
    config = replace(kernel_config(1, (out_size, in_size), META), splits=4)
    yield Case(f"{model.name} int8 weight, 4 splits", lambda: multiply(x, Weight(values, scales), bias, config))


def sampling_cases(vocab: int) -> Iterator[Case]:
    logits = _normal(ROWS, vocab)
    numbers = torch.empty(ROWS, dtype=torch.int32, device=META)
    rows, out = sampling_rows(ROWS, vocab, META), allocate_sampled(ROWS, META)
    yield Case(f"sampling of {vocab}", lambda: sample_rows_triton(logits, numbers, numbers, rows, out))


def _apply(prepare: Callable[[Tensor, Tensor | None], Linear], weight: Tensor, bias: Tensor | None, x: Tensor) -> None:
    prepare(weight, bias)(x)


def _normal(*shape: int) -> Tensor:
    return normal(*shape, dtype=torch.bfloat16, device=META)
