"""The calls that the compile gate makes: every op as a model calls it, to compile what a model would launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pagoda_server.kernels import INT4, BankShape, GroupedFormat, GroupedWeight
from pagoda_server.kernels.activate import FUNCTIONS, SWIGLU, Activation
from pagoda_server.kernels.linear import ExpertRows, Linear
from pagoda_server.kernels.paged import GREATEST, PLAIN_SCORING, Scoring
from pagoda_server.kernels.rope_and_store_kv import HeadNorms
from pagoda_server.kernels.row_sampling import Verified, allocate_sampled
from pagoda_server.kernels.triton.activate import activate_triton
from pagoda_server.kernels.triton.experts import few_rows, multiply_rows, stack_of, weigh
from pagoda_server.kernels.triton.groups import MXFP4
from pagoda_server.kernels.triton.inputs import (
    IQ4_NL,
    LLAMA_1B,
    LLAMA_8B,
    SMOLLM2,
    ModelShape,
    attention_plan,
    normal,
    random_groups,
    random_pages,
    sampling_rows,
)
from pagoda_server.kernels.triton.linear import (
    in_groups,
    kernel_config,
    linear_fp8_weight_triton,
    linear_grouped_triton,
    linear_int8_weight_triton,
)
from pagoda_server.kernels.triton.linear_dequantized import look_up
from pagoda_server.kernels.triton.linear_fixed import fixed_config as fixed_product
from pagoda_server.kernels.triton.low_rank import TritonBank, add_low_rank_triton
from pagoda_server.kernels.triton.paged_attention import paged_attention_triton
from pagoda_server.kernels.triton.paged_fixed import attend_parts
from pagoda_server.kernels.triton.product import Weight, multiply
from pagoda_server.kernels.triton.rms_norm import layer_norm_triton, rms_norm_triton
from pagoda_server.kernels.triton.rope_and_store_kv import rope_and_store_kv_triton
from pagoda_server.kernels.triton.row_sampling import sample_rows_triton
from tests.kernels.products import PARAMETERS, gated

META = torch.device("meta")
CAPPED = Scoring(softcap=50.0, sinks=torch.empty(LLAMA_8B.num_heads, device=META))
FORMATS = {
    "4 bits": INT4,
    "MXFP4": GroupedFormat(table=MXFP4),
    "IQ4_NL": GroupedFormat(table=IQ4_NL),
    "6 bits": GroupedFormat(bits=6, group=16),
    "8 bits": GroupedFormat(bits=8),
    "float8 blocks": GroupedFormat(bits=8, group=128, is_float=True),
}
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
        found += low_rank_cases(model)
    found += product_cases(LLAMA_8B, (1, ROWS, 50, 100, 1000))
    found += product_cases(SMOLLM2, (1, ROWS, 1000))
    found += split_cases(LLAMA_8B)
    found += grouped_product_cases(LLAMA_8B)
    for kv_dtype in GREATEST:
        found += attention_cases(LLAMA_8B, kv_dtype, None)
    found += attention_cases(LLAMA_8B, torch.bfloat16, sliding_window=512)
    found += attention_cases(LLAMA_8B, torch.bfloat16, None, CAPPED)
    found += fixed_product_cases(LLAMA_8B)
    for kv_dtype in (torch.bfloat16, *GREATEST):
        found += fixed_attention_cases(LLAMA_8B, torch.bfloat16, kv_dtype)
    found += fixed_attention_cases(LLAMA_8B, torch.bfloat16, torch.bfloat16, CAPPED)
    found += fixed_attention_cases(SMOLLM2, torch.float32, torch.float32)
    found += expert_cases(num_experts=128, chosen=8, out_size=1536, in_size=2048)
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
    yield Case(f"{model.name} rms_norm", lambda: rms_norm_triton(x, weight, 1e-5))
    yield Case(f"{model.name} rms_norm of a sum", lambda: rms_norm_triton(x, weight, 1e-5, x))
    yield Case(f"{model.name} layer_norm", lambda: layer_norm_triton(x, weight, weight, 1e-5))
    yield Case(f"{model.name} activate", lambda: activate_triton(gate_up, SWIGLU))
    if model is LLAMA_8B:
        for function in FUNCTIONS[1:]:
            plain = Activation(function, is_gated=False, parameters=PARAMETERS.get(function, ()))
            yield Case(f"{model.name} activate, {function}", partial(activate_triton, gate_up, plain))
    float8, int8 = (random_pages(model, 1, ROWS, dtype, META) for dtype in GREATEST)
    centre = torch.empty(model.num_kv_heads, model.head_dim, device=META)
    for name, kv, head_norms in (
        ("", pages, None),
        (", head norms", pages, norms),
        (", float8", float8, None),
        (", int8", int8, None),
    ):
        call = partial(rope_and_store_kv_triton, qkv, cos, sin, slots, kv, head_norms, positions, centre)
        yield Case(f"{model.name} rope{name}", call)


def low_rank_cases(model: ModelShape) -> Iterator[Case]:
    """What adapters add to the products of a layer, and to one in float32."""
    slots = torch.empty(ROWS, dtype=torch.int32, device=META)
    kv_size, query_size = model.num_kv_heads * model.head_dim, model.num_heads * model.head_dim
    for product, sizes, in_size, activation, dtype in (
        ("qkv", (query_size, kv_size, kv_size), model.hidden_size, None, torch.bfloat16),
        ("gate_up", (model.ffn_size, model.ffn_size), model.hidden_size, None, torch.bfloat16),
        ("down", (model.hidden_size,), model.ffn_size, SWIGLU, torch.bfloat16),
        ("output", (model.hidden_size,), query_size, None, torch.float32),
    ):
        bank = TritonBank(BankShape(8, 64, in_size, sizes, dtype, META))
        x = torch.empty(ROWS, in_size * (activation.width if activation else 1), dtype=dtype, device=META)
        out = torch.empty(ROWS, sum(sizes), dtype=dtype, device=META)
        call = partial(add_low_rank_triton, out, x, slots, bank, activation)
        yield Case(f"{model.name} low_rank of {product}, {str(dtype).removeprefix('torch.')}", call)


def attention_cases(
    model: ModelShape, kv_dtype: torch.dtype, sliding_window: int | None, scoring: Scoring = PLAIN_SCORING
) -> Iterator[Case]:
    pages = random_pages(model, ROWS, 1024, kv_dtype, META)
    name = f"{model.name} {str(kv_dtype).removeprefix('torch.')} pages{', window' if sliding_window else ''}"
    name += "" if scoring.is_plain else ", cap and sinks"
    q = _normal(ROWS, model.num_heads, model.head_dim)
    decode, prefill = (
        replace(plan, sliding_window=sliding_window)
        for plan in (attention_plan(ROWS, 1024, 1, META), attention_plan(1, 1024, ROWS, META))
    )
    yield Case(f"{name} decode", lambda: paged_attention_triton(q, pages, decode, scoring))
    yield Case(f"{name} prefill", lambda: paged_attention_triton(q, pages, prefill, scoring))


def product_cases(model: ModelShape, batches: tuple[int, ...]) -> Iterator[Case]:
    """Products with one weight; others differ only in the number of programs."""
    out_size, in_size = model.projections["down"]
    weight, bias = _normal(out_size, in_size), _normal(out_size)
    for rows in batches:
        x, gate_up = _normal(rows, in_size), _normal(rows, 2 * in_size)
        for kind, prepare, prepare_gated in (
            ("int8", linear_int8_weight_triton, gated(linear_int8_weight_triton)),
            ("float8", linear_fp8_weight_triton, gated(linear_fp8_weight_triton)),
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


def grouped_product_cases(model: ModelShape) -> Iterator[Case]:
    """Products with weights in groups of codes, by all kinds of kernels; formats differ only in how they widen."""
    out_size, in_size = model.projections["down"]
    bias = _normal(out_size)
    for kind, form in FORMATS.items():
        weight = random_groups(form, out_size, in_size, META)
        for rows in (1, ROWS, 50, 100, 1000) if form == INT4 else (1, ROWS, 1000):
            name = f"{model.name} {kind} weight, {rows} rows"
            x, gate_up = _normal(rows, in_size), _normal(rows, 2 * in_size)
            yield Case(name, partial(_apply, linear_grouped_triton, weight, None, x))
            if form == INT4 and rows == ROWS:
                yield Case(f"{name}, bias", partial(_apply, linear_grouped_triton, weight, bias, x))
            if form == INT4 and rows == 1:
                yield Case(f"{name}, gated", partial(_apply, gated(linear_grouped_triton), weight, None, gate_up))
        for dtype in (torch.bfloat16, torch.float32) if kind in ("4 bits", "8 bits") else ():
            config = fixed_product(in_size, dtype.itemsize, in_groups=True)
            x = normal(ROWS, in_size, dtype=dtype, device=META)
            name = f"{model.name} {kind} weight, {str(dtype).removeprefix('torch.')} rows, fixed, one sum"
            yield Case(name, partial(multiply, x, in_groups(weight), None, config, adds_up=True))
    ids = torch.empty(ROWS, dtype=torch.int64, device=META)
    table = in_groups(random_groups(INT4, model.vocab_size, model.hidden_size, META))
    yield Case(f"{model.name} rows of a table in 4 bits", partial(look_up, table, ids, torch.bfloat16))


def fixed_product_cases(model: ModelShape) -> Iterator[Case]:
    """Products with sums in a fixed order, added up by the programs themselves or by another launch."""
    sizes = model.projections["down"]
    for kind, dtype in (("bfloat16", torch.bfloat16), ("int8", torch.int8), ("float8", torch.float8_e4m3fn)):
        weight = Weight(
            torch.empty(sizes, dtype=dtype, device=META),
            None if dtype is torch.bfloat16 else torch.empty(sizes[0], device=META),
        )
        for adds_up in (True, False):
            name = f"{model.name} {kind} weight, fixed, {'one sum' if adds_up else 'split'}"
            x = _normal(ROWS, sizes[1])
            yield Case(name, partial(multiply, x, weight, None, fixed_product(sizes[1], 2), adds_up=adds_up))
    x, whole = torch.empty(ROWS, sizes[1], device=META), Weight(torch.empty(sizes, device=META))
    name = f"{model.name} float32 weight, fixed, one sum"
    yield Case(name, partial(multiply, x, whole, None, fixed_product(sizes[1], 4), adds_up=True))


def expert_cases(num_experts: int, chosen: int, out_size: int, in_size: int) -> Iterator[Case]:
    """Products of the rows of experts, for few and many rows of one, and the sums of a row's experts."""
    starts, sources = (torch.empty(size, dtype=torch.int32, device=META) for size in (num_experts + 1, ROWS * chosen))
    rows, sizes = ExpertRows(starts, sources), (num_experts, out_size, in_size)
    x, bias = _normal(ROWS, in_size), _normal(num_experts, out_size)
    kinds = {"bfloat16": Weight(torch.empty(sizes, dtype=torch.bfloat16, device=META))}
    for kind, dtype in (("int8", torch.int8), ("float8", torch.float8_e4m3fn)):
        scales = torch.empty(num_experts, out_size, device=META)
        kinds[kind] = Weight(torch.empty(sizes, dtype=dtype, device=META), scales)
    for kind, form in FORMATS.items():
        kinds[kind] = stack_of(num_experts, in_groups(random_groups(form, out_size, in_size, META)))
    for kind, weight in kinds.items():
        for config in (few_rows(weight), fixed_product(in_size, 2, in_groups=weight.group > 0)):
            name = f"{num_experts} experts, {kind} weights, tiles of {config.rows} rows"
            narrow = frozenset({"_multiply_rows"}) if weight.table else frozenset()  # 8 bytes of nibbles a thread
            yield Case(name, partial(multiply_rows, x, weight, bias, rows, config), narrow)
    wide, whole = torch.empty(ROWS, in_size, device=META), Weight(torch.empty(sizes, device=META))
    name = f"{num_experts} experts, float32 weights"
    yield Case(name, partial(multiply_rows, wide, whole, None, rows, fixed_product(in_size, 4)))
    places, shared = torch.empty(ROWS, chosen, dtype=torch.int32, device=META), _normal(ROWS, in_size)
    weights, gates = torch.empty(ROWS, chosen, device=META), torch.empty(ROWS, 1, device=META)
    yield Case("sums of experts", partial(weigh, _normal(ROWS * chosen, in_size), places, weights, shared, gates))


def fixed_attention_cases(
    model: ModelShape, dtype: torch.dtype, kv_dtype: torch.dtype, scoring: Scoring = PLAIN_SCORING
) -> Iterator[Case]:
    """Attention with sums in a fixed order, of decodes whose parts several programs share."""
    pages = random_pages(model, ROWS, 1024, kv_dtype, META)
    name = f"{model.name} {str(kv_dtype).removeprefix('torch.')} pages, fixed"
    name += "" if scoring.is_plain else ", cap and sinks"
    q = normal(ROWS, model.num_heads, model.head_dim, dtype=dtype, device=META)
    plan = attention_plan(ROWS, 1024, 1, META)
    call = partial(
        attend_parts, q, pages, plan, scoring, torch.empty_like(q), slice(0, ROWS), num_tokens=ROWS, num_shares=2
    )
    # A head of 64 dimensions has fewer bytes for each thread of a warp.
    yield Case(name, call, frozenset({"_merge_parts"}) if model.head_dim < 128 else frozenset())


def sampling_cases(vocab: int) -> Iterator[Case]:
    logits = _normal(ROWS, vocab)
    numbers = torch.empty(ROWS, dtype=torch.int32, device=META)
    rows, out = sampling_rows(ROWS, vocab, META), allocate_sampled(ROWS, META)
    yield Case(f"sampling of {vocab}", lambda: sample_rows_triton(logits, numbers, numbers, rows, out))
    verified = Verified(numbers, numbers.long())
    call = partial(sample_rows_triton, logits, numbers, numbers, rows, out, verified)
    yield Case(f"sampling of {vocab} with drafts", call)


def _apply(prepare: Callable[..., Linear], weight: Tensor | GroupedWeight, bias: Tensor | None, x: Tensor) -> None:
    prepare(weight, bias)(x)


def _normal(*shape: int) -> Tensor:
    return normal(*shape, dtype=torch.bfloat16, device=META)
