"""The ops to tune, at the shapes of real models, in order of importance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from pagoda_server.kernels.linear import Linear
from pagoda_server.kernels.paged import AttentionPlan, PagedKV
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
from pagoda_server.kernels.triton.linear import gated_linear_triton, linear_triton
from pagoda_server.kernels.triton.linear_quantized import (
    gated_linear_fp8_weight_triton,
    gated_linear_int8_weight_triton,
    kernel_config,
    linear_fp8_weight_triton,
    linear_int8_weight_triton,
)
from pagoda_server.kernels.triton.paged_attention import paged_attention_triton
from pagoda_server.kernels.triton.rms_norm import rms_norm_triton
from pagoda_server.kernels.triton.rope_and_store_kv import rope_and_store_kv_triton
from pagoda_server.kernels.triton.row_sampling import sample_rows_triton
from pagoda_server.kernels.triton.silu_and_mul import silu_and_mul_triton
from pagoda_server.kernels.triton.timing import num_copies

Call: TypeAlias = Callable[[], object]
Prepare: TypeAlias = Callable[[Tensor, Tensor | None], Linear]

Shapes: TypeAlias = Sequence[tuple[int, int, int]]  # batch, context, queries of each sequence

DECODES: Shapes = ((64, 1024, 1), (1, 4096, 1))
PREFILLS: Shapes = ((1, 4096, 4096), (1, 8192, 1024))
BATCHES = (1, 16, 32, 64)  # rows that a product is tuned for
ROWS = (64, 8192)  # that ops on single rows are tuned for: decodes, and long prompts
DRAWS = 128  # rows that are sampled together
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Space:
    """An op at one shape.

    workloads  for each size that matters, equal calls on separate buffers; all use one configuration
    result     of one call, by which configurations are compared
    start      fields to start from if the default launches no kernel of ours
    """

    op: str
    workloads: Callable[[], Sequence[Sequence[Call]]]
    result: Callable[[], Tensor]
    start: dict[str, int] = field(default_factory=dict)


def spaces(device: torch.device, models: Sequence[ModelShape] = (LLAMA_8B, LLAMA_1B, SMOLLM2)) -> Iterator[Space]:
    """Yield spaces one at a time, since each has its tensors on the device."""
    bfloat16, float8 = torch.bfloat16, torch.float8_e4m3fn
    for model in models:
        yield decode_space(model, bfloat16, device)
    yield sampling_space(models[0].vocab_size, device)
    for model in models:
        yield prefill_space(model, bfloat16, device)
        yield from layer_spaces(model, device)
    for model in models[:2]:
        yield from product_spaces(model, "linear", linear_triton, gated_linear_triton, device)
    yield decode_space(models[0], float8, device)
    yield prefill_space(models[0], float8, device)
    int8 = linear_int8_weight_triton, gated_linear_int8_weight_triton
    fp8 = linear_fp8_weight_triton, gated_linear_fp8_weight_triton
    yield from product_spaces(models[0], "linear_int8_weight", *int8, device)
    yield from product_spaces(models[0], "linear_fp8_weight", *fp8, device)


def decode_space(model: ModelShape, kv_dtype: torch.dtype, device: torch.device, shapes: Shapes = DECODES) -> Space:
    """A large batch, which tests bandwidth, and one long context, which must be split among all processors."""
    return _attention_space("paged_decode", model, kv_dtype, shapes, device)


def prefill_space(model: ModelShape, kv_dtype: torch.dtype, device: torch.device, shapes: Shapes = PREFILLS) -> Space:
    """A whole prompt, and a later chunk of a prompt."""
    return _attention_space("paged_prefill", model, kv_dtype, shapes, device)


def _attention_space(op: str, model: ModelShape, kv_dtype: torch.dtype, shapes: Shapes, device: torch.device) -> Space:
    def inputs(batch: int, context: int, query_len: int) -> tuple[Tensor, PagedKV, AttentionPlan]:
        q = normal(batch * query_len, model.num_heads, model.head_dim, dtype=torch.bfloat16, device=device)
        pages = random_pages(model, batch, context, kv_dtype, device)
        return q, pages, attention_plan(batch, context, query_len, device)

    def copies(batch: int, context: int) -> int:
        return num_copies(2 * batch * context * model.num_kv_heads * model.head_dim * kv_dtype.itemsize)

    sets = [[inputs(*shape) for _ in range(copies(*shape[:2]))] for shape in shapes]
    return Space(
        op,
        lambda: [[partial(paged_attention_triton, *one) for one in alike] for alike in sets],
        lambda: paged_attention_triton(*sets[0][0]),
    )


def sampling_space(vocab: int, device: torch.device, draws: int = DRAWS) -> Space:
    """A batch drawn with top-k and top-p, and a single greedy row."""
    calls, tokens = [], []
    for batch, temperature, top_k, top_p in ((draws, 0.8, 50, 0.95), (1, 0.0, 0, 1.0)):
        numbers = torch.arange(batch, dtype=torch.int32, device=device)
        rows = sampling_rows(batch, vocab, device, temperature=temperature, top_k=top_k, top_p=top_p)
        out = allocate_sampled(batch, device)
        logits = [
            normal(batch, vocab, dtype=torch.bfloat16, device=device) for _ in range(num_copies(2 * batch * vocab))
        ]
        tokens.append(out.tokens)
        calls.append([partial(sample_rows_triton, x, numbers, numbers, rows, out) for x in logits])

    def result() -> Tensor:
        calls[0][0]()
        return tokens[0].clone()

    return Space("sample_rows", lambda: calls, result)


def layer_spaces(model: ModelShape, device: torch.device, rows: tuple[int, int] = ROWS) -> Iterator[Space]:
    few, _ = rows
    sets = [_copies(count, model.hidden_size, device) for count in rows]
    weight = normal(model.hidden_size, dtype=torch.bfloat16, device=device)
    yield Space(
        "rms_norm",
        lambda: [[partial(rms_norm_triton, x, weight, EPS) for x in alike] for alike in sets],
        lambda: rms_norm_triton(sets[0][0], weight, EPS),
    )
    gate_ups = [_copies(count, 2 * model.ffn_size, device) for count in rows]
    yield Space(
        "silu_and_mul",
        lambda: [[partial(silu_and_mul_triton, x) for x in alike] for alike in gate_ups],
        lambda: silu_and_mul_triton(gate_ups[0][0]),
    )
    heads = [x.view(few, -1, model.head_dim) for x in _copies(few, model.qkv_size, device)]
    cos, sin = torch.rand(2, few, model.head_dim // 2, device=device)
    slots = torch.arange(few, device=device)
    pages = random_pages(model, 1, few, torch.bfloat16, device)
    yield Space(
        "rope_and_store_kv",
        lambda: [[partial(rope_and_store_kv_triton, x, cos, sin, slots, pages) for x in heads]],
        lambda: rope_and_store_kv_triton(heads[0], cos, sin, slots, pages),
    )


def product_spaces(
    model: ModelShape,
    op: str,
    prepare: Prepare,
    prepare_gated: Prepare,
    device: torch.device,
    batches: Sequence[int] = BATCHES,
) -> Iterator[Space]:
    """Every weight of a model, with every batch for which our kernel might be faster."""
    for name, (out_size, in_size) in model.projections.items():
        is_gated = name == "down"
        copies = num_copies(2 * out_size * in_size)
        weights = [normal(out_size, in_size, dtype=torch.bfloat16, device=device) for _ in range(copies)]
        products = [(prepare_gated if is_gated else prepare)(weight, None) for weight in weights]
        for rows in batches:
            x = normal(rows, in_size * (2 if is_gated else 1), dtype=torch.bfloat16, device=device)
            calls = [partial(product, x) for product in products]
            start = asdict(kernel_config(rows, (out_size, in_size), device))
            yield Space(f"gated_{op}" if is_gated else op, partial(list, [calls]), calls[0], start)


def _copies(rows: int, width: int, device: torch.device) -> list[Tensor]:
    return [normal(rows, width, dtype=torch.bfloat16, device=device) for _ in range(num_copies(2 * rows * width))]
