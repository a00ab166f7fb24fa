"""Attention over pages: decodes by bytes of keys and values read, prefill by operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.gpu.rows import Bar, Bench, Row, Work, measure, relative_error
from pagoda_server.kernels.paged import GREATEST, PagedKV
from pagoda_server.kernels.paged_attention import paged_attention
from pagoda_server.kernels.triton.inputs import (
    BLOCK_SIZE,
    LLAMA_1B,
    LLAMA_8B,
    ModelShape,
    attention_plan,
    normal,
    random_pages,
)
from pagoda_server.kernels.triton.paged_attention import paged_attention_triton
from pagoda_server.kernels.triton.timing import num_copies

TOLERANCES = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 2e-2, torch.int8: 2e-2}
TINY = ModelShape("tiny", 2, 8, 2, 32, 64, 96, 300)
LONG, SHORT = 65536, 512  # contexts of an uneven batch
VARLEN_PAGE = 256  # tokens; the page size that FlashAttention 2 requires
FLASHINFER_WORKSPACE = 128 << 20  # bytes; what its documentation asks for
ALMOST, WELL = Bar(fraction=0.9), Bar(fraction=0.85)


def decode_rows(bench: Bench) -> Iterator[Row]:
    bfloat16 = torch.bfloat16
    if bench.is_small:
        yield measure(_decode(TINY, bfloat16, 3, 40, bench, ALMOST), bench)
        for pages in GREATEST:
            yield measure(_decode(TINY, pages, 2, 24, bench, None), bench)
        yield measure(_uneven(TINY, 100, 10, 3, bench), bench)
        return
    yield measure(_decode(LLAMA_8B, bfloat16, 1, 4096, bench, Bar(time_us=15)), bench)
    yield measure(_decode(LLAMA_8B, bfloat16, 32, 1024, bench, WELL), bench)
    for batch, context in ((64, 1024), (128, 1024), (256, 1024), (32, 8192)):
        yield measure(_decode(LLAMA_8B, bfloat16, batch, context, bench, ALMOST), bench)
    yield measure(_decode(LLAMA_1B, bfloat16, 128, 1024, bench, ALMOST), bench)
    for pages in GREATEST:
        yield measure(_decode(LLAMA_8B, pages, 128, 1024, bench, None), bench)
    yield measure(_uneven(LLAMA_8B, LONG, SHORT, 31, bench), bench)


def prefill_rows(bench: Bench) -> Iterator[Row]:
    if bench.is_small:
        yield measure(_prefill(TINY, 2, 24, 24, bench, Bar(tflops=400)), bench)
        yield measure(_prefill(TINY, 1, 8, 40, bench, None), bench)
        return
    bar = Bar(tflops=400)
    yield measure(_prefill(LLAMA_8B, 16, 512, 512, bench, None), bench)
    yield measure(_prefill(LLAMA_8B, 1, 4096, 4096, bench, bar), bench)
    yield measure(_prefill(LLAMA_8B, 4, 4096, 4096, bench, bar), bench)
    yield measure(_prefill(LLAMA_8B, 1, 2048, 8192, bench, bar), bench)
    yield measure(_prefill(LLAMA_1B, 4, 4096, 4096, bench, None), bench)


def _decode(model: ModelShape, kv_dtype: torch.dtype, batch: int, context: int, bench: Bench, bar: Bar | None) -> Work:
    case = f"{model.name}, {_name(kv_dtype)} pages, {batch} × {context}"
    return _work("decode attention", case, model, kv_dtype, _Shape(batch, 1, context), bench, bar)


def _uneven(model: ModelShape, long: int, short: int, num_short: int, bench: Bench) -> Work:
    """One long context among short ones, which it must not delay."""
    pages = random_pages(model, 1 + num_short, long, torch.bfloat16, bench.device)
    plan = attention_plan(1 + num_short, long, 1, bench.device)
    lengths = torch.full_like(plan.context_len, short)
    lengths[0] = long
    plan = replace(plan, context_len=lengths)
    q = normal(1 + num_short, model.num_heads, model.head_dim, dtype=torch.bfloat16, device=bench.device)
    return Work(
        "decode attention",
        f"{model.name}, bfloat16 pages, 1 × {long} and {num_short} × {short}",
        num_bytes=_kv_bytes(pages) * (long + num_short * short) + 2 * q.nbytes,
        flops=0.0,
        calls=lambda: [partial(paged_attention_triton, q, pages, plan)],
        error=lambda: relative_error(paged_attention_triton(q, pages, plan), paged_attention(q, pages, plan)),
        tolerance=TOLERANCES[torch.bfloat16],
    )


def _prefill(model: ModelShape, batch: int, query_len: int, context: int, bench: Bench, bar: Bar | None) -> Work:
    case = f"{model.name}, {batch} × {query_len} of {context}"
    return _work("prefill attention", case, model, torch.bfloat16, _Shape(batch, query_len, context), bench, bar)


@dataclass(frozen=True, slots=True)
class _Shape:
    """`batch` sequences; the last `query_len` tokens of each attend to its context."""

    batch: int
    query_len: int
    context: int


def _work(
    part: str, case: str, model: ModelShape, kv_dtype: torch.dtype, shape: _Shape, bench: Bench, bar: Bar | None
) -> Work:
    batch, query_len, context = shape.batch, shape.query_len, shape.context
    plan = attention_plan(batch, context, query_len, bench.device)

    def inputs() -> tuple[Tensor, PagedKV]:
        q = normal(batch * query_len, model.num_heads, model.head_dim, dtype=torch.bfloat16, device=bench.device)
        return q, random_pages(model, batch, context, kv_dtype, bench.device)

    q, pages = first = inputs()
    kv_bytes = _kv_bytes(pages) * batch * context
    copies = 2 if bench.is_small else num_copies(kv_bytes)
    seen = batch * (query_len * context - query_len * (query_len - 1) // 2)  # pairs of a query and a key

    def rival(call: Callable[[ModelShape, _Shape, Bench], Callable[[], object]]) -> list[Callable[[], object]]:
        return [call(model, shape, bench) for _ in range(copies)]

    return Work(
        part,
        case,
        num_bytes=kv_bytes + 2 * q.nbytes,
        flops=4.0 * seen * model.num_heads * model.head_dim if query_len > 1 else 0.0,
        calls=lambda: [
            partial(paged_attention_triton, *each, plan) for each in (first, *(inputs() for _ in range(copies - 1)))
        ],
        error=lambda: relative_error(paged_attention_triton(q, pages, plan), paged_attention(q, pages, plan)),
        tolerance=TOLERANCES[kv_dtype],
        others={
            "torch SDPA, contiguous": lambda: rival(_sdpa),
            "cuDNN, contiguous": lambda: rival(_cudnn),
            "torch varlen": lambda: rival(_varlen),
            **({"FlashInfer": lambda: rival(_flashinfer)} if find_spec("flashinfer") else {}),
        },
        bar=bar,
    )


def _kv_bytes(pages: PagedKV) -> int:
    """Bytes of one token's keys and values."""
    scales = 0 if pages.key_scales is None else 2 * pages.key_scales.dtype.itemsize
    return pages.num_kv_heads * (2 * pages.head_dim * pages.dtype.itemsize + scales)


def _sdpa(model: ModelShape, shape: _Shape, bench: Bench) -> Callable[[], object]:
    """torch's attention on contiguous keys and values, as in a cache without pages."""
    batch, query_len, context = shape.batch, shape.query_len, shape.context
    randn = partial(torch.randn, dtype=torch.bfloat16, device=bench.device)
    q = randn(batch, model.num_heads, query_len, model.head_dim)
    keys, values = (randn(batch, model.num_kv_heads, context, model.head_dim) for _ in range(2))
    # is_causal alone would let the first query see the first key only.
    mask = causal_lower_right(query_len, context) if 1 < query_len < context else None
    is_causal = query_len == context > 1
    attend = functional.scaled_dot_product_attention
    return partial(attend, q, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=True)


def _cudnn(model: ModelShape, shape: _Shape, bench: Bench) -> Callable[[], object]:
    """cuDNN's attention, which torch calls where its own is not faster."""
    if 1 < shape.query_len < shape.context:
        raise NotImplementedError("torch gives cuDNN no mask aligned to the last key")
    attend = _sdpa(model, shape, bench)

    def call() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend()

    return call


def _flashinfer(model: ModelShape, shape: _Shape, bench: Bench) -> Callable[[], object]:
    """FlashInfer's attention over pages of our size."""
    import flashinfer

    pages = random_pages(model, shape.batch, shape.context, torch.bfloat16, bench.device)
    plan = attention_plan(shape.batch, shape.context, shape.query_len, bench.device)
    q = normal(
        shape.batch * shape.query_len, model.num_heads, model.head_dim, dtype=torch.bfloat16, device=bench.device
    )
    blocks_each = plan.block_table.shape[1]
    starts = torch.arange(0, (shape.batch + 1) * blocks_each, blocks_each, dtype=torch.int32, device=bench.device)
    used = torch.full((shape.batch,), (shape.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=bench.device)
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=bench.device)
    sizes = (model.num_heads, model.num_kv_heads, model.head_dim, BLOCK_SIZE)
    table = plan.block_table.flatten()
    if shape.query_len == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(starts, table, used, *sizes, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(plan.query_start, starts, table, used, *sizes, causal=True, q_data_type=torch.bfloat16)
    return partial(wrapper.run, q, (pages.keys, pages.values))


def _varlen(model: ModelShape, shape: _Shape, bench: Bench) -> Callable[[], object]:
    """torch's attention on packed sequences, over pages if the installed release supports them."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return _varlen_contiguous(varlen_attn, model, shape, bench)
    batch, query_len, context = shape.batch, shape.query_len, shape.context
    randn = partial(torch.randn, dtype=torch.bfloat16, device=bench.device)
    blocks_each = -(-context // VARLEN_PAGE)
    q = randn(batch * query_len, model.num_heads, model.head_dim)
    keys, values = (randn(batch * blocks_each, VARLEN_PAGE, model.num_kv_heads, model.head_dim) for _ in range(2))
    starts = torch.arange(0, (batch + 1) * query_len, query_len, dtype=torch.int32, device=bench.device)
    table = torch.randperm(batch * blocks_each, device=bench.device).int().view(batch, blocks_each)
    used = torch.full((batch,), context, dtype=torch.int32, device=bench.device)
    return partial(
        varlen_attn,
        q,
        keys,
        values,
        starts,
        None,
        query_len,
        context,
        window_size=_window(query_len),
        enable_gqa=True,
        seqused_k=used,
        block_table=table,
    )


def _varlen_contiguous(
    attend: Callable[..., object], model: ModelShape, shape: _Shape, bench: Bench
) -> Callable[[], object]:
    """The same without block tables, for older releases. Its mask is aligned to the last key."""
    batch, query_len, context = shape.batch, shape.query_len, shape.context
    randn = partial(torch.randn, dtype=torch.bfloat16, device=bench.device)
    q = randn(batch * query_len, model.num_heads, model.head_dim)
    keys, values = (randn(batch * context, model.num_kv_heads, model.head_dim) for _ in range(2))
    query_start, key_start = (
        torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=bench.device)
        for length in (query_len, context)
    )
    window: dict[str, object] = {"window_size": _window(query_len)}
    if "window_size" not in inspect.signature(attend).parameters:
        window = {"is_causal": query_len > 1}
    return partial(attend, q, keys, values, query_start, key_start, query_len, context, **window)


def _window(query_len: int) -> tuple[int, int]:
    """A causal window. One query needs none; without it FlashAttention computes heads that share a KV head together."""
    return (-1, -1 if query_len == 1 else 0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
