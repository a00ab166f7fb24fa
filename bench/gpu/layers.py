"""Kernels around attention: norms, rotations and activations by bytes moved; products by bytes moved or operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.attention import TINY
from bench.gpu.rows import Bar, Bench, Row, Work, measure, relative_error
from pagoda_server.kernels import INT4, GroupedFormat
from pagoda_server.kernels.activate import SWIGLU, activate
from pagoda_server.kernels.linear import LinearMaker
from pagoda_server.kernels.paged import PagedKV
from pagoda_server.kernels.rms_norm import rms_norm
from pagoda_server.kernels.rope_and_store_kv import rope_and_store_kv
from pagoda_server.kernels.triton.activate import activate_triton
from pagoda_server.kernels.triton.groups import MXFP4
from pagoda_server.kernels.triton.inputs import LLAMA_8B, ModelShape, normal, random_groups, random_pages
from pagoda_server.kernels.triton.linear import (
    linear_fp8_weight_triton,
    linear_grouped_triton,
    linear_int8_weight_triton,
    linear_triton,
)
from pagoda_server.kernels.triton.rms_norm import rms_norm_triton
from pagoda_server.kernels.triton.rope_and_store_kv import rope_and_store_kv_triton
from pagoda_server.kernels.triton.timing import num_copies

EPS = 1e-5
TOLERANCE = 1e-2
MANY = 8192  # rows, where only bandwidth counts
DECODES = (1, 32, 128)
# The first ones tell most: time may run out.
PROJECTION_ROWS = (1, 32, 128, 512, 2048, 8192, 8, 64, 256, 1024, 4096, 2, 4, 16)
FEW_ROWS = 64  # of a product that a decode step makes: it must read the weight at the speed of a copy
MOST_HEAD_ROWS = 256  # only the last token of a sequence has logits
CHECKED_ROWS = 256  # of a result, spread over all
AT_ONCE, FAST = Bar(time_us=3), Bar(fraction=0.85)


def rows(bench: Bench) -> Iterator[Row]:
    model = TINY if bench.is_small else LLAMA_8B
    for count in (2,) if bench.is_small else (*DECODES, MANY):
        yield measure(_norm(model, count, bench), bench)
        yield measure(_activation(model, count, bench), bench)
        yield measure(_rotation(model, count, bench), bench)


def _norm(model: ModelShape, count: int, bench: Bench) -> Work:
    inputs = _tensors(count, model.hidden_size, bench)
    residuals = _tensors(count, model.hidden_size, bench)
    weight = normal(model.hidden_size, dtype=torch.bfloat16, device=bench.device)

    def error() -> float:
        ours, theirs = residuals[0].clone(), residuals[0].clone()
        found, expected = rms_norm_triton(inputs[0], weight, EPS, ours), rms_norm(inputs[0], weight, EPS, theirs)
        return max(relative_error(found, expected), relative_error(ours, theirs))

    def eager(x: Tensor, residual: Tensor) -> Tensor:
        return functional.rms_norm(residual.add_(x), (model.hidden_size,), weight, EPS)

    pairs = list(zip(inputs, residuals, strict=True))
    return Work(
        "residual + RMSNorm",
        f"{model.name}, {count} rows",
        num_bytes=4 * inputs[0].nbytes,
        flops=0.0,
        calls=lambda: [partial(rms_norm_triton, x, weight, EPS, residual) for x, residual in pairs],
        error=error,
        tolerance=TOLERANCE,
        others={"torch": lambda: [partial(eager, x, residual) for x, residual in pairs]},
        bar=_bar(count),
    )


def _activation(model: ModelShape, count: int, bench: Bench) -> Work:
    inputs = _tensors(count, 2 * model.ffn_size, bench)

    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return Work(
        "SiLU · mul",
        f"{model.name}, {count} rows",
        num_bytes=1.5 * inputs[0].nbytes,
        flops=0.0,
        calls=lambda: [partial(activate_triton, x, SWIGLU) for x in inputs],
        error=lambda: relative_error(activate_triton(inputs[0], SWIGLU), activate(inputs[0], SWIGLU)),
        tolerance=TOLERANCE,
        others={"torch": lambda: [partial(eager, x) for x in inputs]},
        bar=_bar(count),
    )


def _rotation(model: ModelShape, count: int, bench: Bench) -> Work:
    inputs = [x.view(count, -1, model.head_dim) for x in _tensors(count, model.qkv_size, bench)]
    cos, sin = torch.rand(2, count, model.head_dim // 2, device=bench.device)
    slots = torch.randperm(2 * count, device=bench.device)[:count]
    pages = random_pages(model, 2, count, torch.bfloat16, bench.device)

    def error() -> float:
        theirs = PagedKV(pages.keys.clone(), pages.values.clone())
        found = rope_and_store_kv_triton(inputs[0], cos, sin, slots, pages)
        expected = rope_and_store_kv(inputs[0], cos, sin, slots, theirs)
        stored = max(relative_error(pages.keys, theirs.keys), relative_error(pages.values, theirs.values))
        return max(stored, relative_error(found, expected))

    return Work(
        "RoPE + KV write",
        f"{model.name}, {count} rows",
        num_bytes=2 * inputs[0].nbytes + cos.nbytes + sin.nbytes + slots.nbytes,
        flops=0.0,
        calls=lambda: [partial(rope_and_store_kv_triton, x, cos, sin, slots, pages) for x in inputs],
        error=error,
        tolerance=TOLERANCE,
        others={"torch": lambda: [partial(_torch_rotation, x, cos, sin, slots, pages) for x in inputs]},
        bar=Bar(time_us=4) if count <= max(DECODES) else None,
    )


def _torch_rotation(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pages: PagedKV) -> Tensor:
    """RoPE and KV write in plain torch, without the reference's check of the slots."""
    rotated, values = qkv[:, : -pages.num_kv_heads], qkv[:, -pages.num_kv_heads :]
    first, second = rotated.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    pages.keys.flatten(0, 1).index_copy_(0, slots, rotated[:, -pages.num_kv_heads :])
    pages.values.flatten(0, 1).index_copy_(0, slots, values)
    return rotated[:, : -pages.num_kv_heads]


def _tensors(count: int, width: int, bench: Bench) -> list[Tensor]:
    copies = 2 if bench.is_small else num_copies(2 * count * width)
    return [normal(count, width, dtype=torch.bfloat16, device=bench.device) for _ in range(copies)]


def _bar(count: int) -> Bar | None:
    return AT_ONCE if count <= max(DECODES) else FAST


# -- products ----------------------------------------------------------------------------------------------------------


def projection_rows(bench: Bench) -> Iterator[Row]:
    model = TINY if bench.is_small else LLAMA_8B
    for count in (3, 20) if bench.is_small else PROJECTION_ROWS:
        for name, size in model.projections.items():
            if name == "head" and count > MOST_HEAD_ROWS:
                continue
            others: dict[str, float] = {}  # torch's time, measured once for all formats of the weight
            for kind, prepare, form, weight_bytes, tolerance in (
                ("bfloat16", linear_triton, None, 2.0, 1e-2),
                ("int8", linear_int8_weight_triton, None, 1.0, 2e-2),
                ("float8", linear_fp8_weight_triton, None, 1.0, 5e-2),
                ("int4", linear_grouped_triton, INT4, 20 / 32, 1e-2),
                ("8 bits in groups", linear_grouped_triton, GroupedFormat(bits=8), 34 / 32, 1e-2),
                ("MXFP4", linear_grouped_triton, GroupedFormat(table=MXFP4), 18 / 32, 1e-2),
            ):
                case = f"{model.name} {name}, {kind}, {count} rows"
                work = _projection(case, size, count, prepare, form, weight_bytes, tolerance, bench)
                row = measure(replace(work, others={}) if others else work, bench)
                others |= row.others
                yield replace(row, others=others)


def _projection(
    case: str,
    size: tuple[int, int],
    count: int,
    prepare: LinearMaker,
    form: GroupedFormat | None,
    weight_bytes: float,
    tolerance: float,
    bench: Bench,
) -> Work:
    """The limit of few rows is the weight's bytes, that of many the operations at bfloat16's rate."""
    num_bytes = weight_bytes * size[0] * size[1]
    copies = 2 if bench.is_small else num_copies(int(num_bytes))
    whole = [] if form else [normal(*size, dtype=torch.bfloat16, device=bench.device) for _ in range(copies)]
    grouped = [random_groups(form, *size, bench.device) for _ in range(copies)] if form else []
    x = normal(count, size[1], dtype=torch.bfloat16, device=bench.device)

    def error() -> float:
        step = -(-count // CHECKED_ROWS)
        weight = grouped[0].dequantize() if form else whole[0].float()
        return relative_error(prepare((whole or grouped)[0], None)(x)[::step], x[::step].float() @ weight.T)

    def prepared() -> Sequence[Callable[[], object]]:
        return [partial(prepare(weight, None), x) for weight in whole or grouped]

    return Work(
        "projections",
        case,
        num_bytes=num_bytes + x.nbytes + 2 * count * size[0],
        flops=2.0 * count * size[0] * size[1],
        calls=prepared,
        error=error,
        tolerance=tolerance,
        others={"torch bfloat16": lambda: [partial(functional.linear, x, weight) for weight in whole]},
        bar=FAST if count <= FEW_ROWS else None,
    )
