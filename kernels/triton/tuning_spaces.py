"""The ops to tune, at the shapes of real models, in order of importance: products take most of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ..activate import SWIGLU
from ..grouped_weight import INT4, GroupedFormat, GroupedWeight
from ..linear import GATED, LinearMaker, Use
from ..paged import AttentionPlan, PagedKV
from ..row_sampling import allocate_sampled
from .activate import activate_triton
from .dependent_launch import OFF
from .inputs import (
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
from .linear import (
    kernel_config,
    linear_fp8_weight_triton,
    linear_grouped_triton,
    linear_int8_weight_triton,
    linear_triton,
)
from .paged_attention import paged_attention_triton
from .product import NO_KERNEL
from .rms_norm import rms_norm_triton
from .rope_and_store_kv import rope_and_store_kv_triton
from .row_sampling import sample_rows_triton
from .timing import num_copies

Call: TypeAlias = Callable[[], object]

Shapes: TypeAlias = Sequence[tuple[int, int, int]]  # batch, context, queries of each sequence

DECODES: Shapes = ((64, 1024, 1), (1, 4096, 1))
PREFILLS: Shapes = ((1, 4096, 4096), (1, 8192, 1024))
BATCHES = (1, 16, 32, 64)  # rows that a product is tuned for
MORE_ROWS = (128, 256, 512)  # with an 8-bit weight, for which the library is slower
ROWS = (64, 8192)  # that ops on single rows are tuned for: decodes, and long prompts
DRAWS = 128  # rows that are sampled together
POSITIONS = 8192  # of the table of rotations
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Work:
    """The calls of an op at one shape, on tensors of one device.

    workloads  for each size that matters, equal calls on separate buffers; all use one configuration
    result     of one call, by which configurations are compared
    rivals     the default's rivals, which are tried first: a kernel of ours, or none, for which the library works
    """

    workloads: Sequence[Sequence[Call]]
    result: Callable[[], Tensor]
    rivals: Sequence[dict[str, int]] = ()


@dataclass(frozen=True, slots=True)
class Space:
    """An op at one shape. `work` allocates its tensors on a device; nothing is allocated before."""

    name: str
    op: str
    work: Callable[[torch.device], Work]


def spaces(models: Sequence[ModelShape] = (LLAMA_8B, LLAMA_1B, SMOLLM2)) -> list[Space]:
    bfloat16, float8 = torch.bfloat16, torch.float8_e4m3fn
    largest, *smaller = models
    found = [*product_spaces(largest, "linear", linear_triton), decode_space(largest, bfloat16)]
    for model in smaller[:1]:
        found += product_spaces(model, "linear", linear_triton)
    found += product_spaces(largest, "linear_int8_weight", linear_int8_weight_triton, (*BATCHES, *MORE_ROWS))
    found += product_spaces(largest, "linear_fp8_weight", linear_fp8_weight_triton, (*BATCHES, *MORE_ROWS))
    found += product_spaces(largest, "linear_4_bits", linear_grouped_triton, (*BATCHES, *MORE_ROWS), INT4)
    eight_bits = GroupedFormat(bits=8)
    found += product_spaces(largest, "linear_8_bits", linear_grouped_triton, (*BATCHES, *MORE_ROWS), eight_bits)
    found += [launch_space(largest), sampling_space(largest.vocab_size), prefill_space(largest, bfloat16)]
    found += [decode_space(model, bfloat16) for model in smaller]
    for model in models:
        found += layer_spaces(model)
    found += [prefill_space(model, bfloat16) for model in smaller]
    return [*found, decode_space(largest, float8), prefill_space(largest, float8)]


def product_spaces(
    model: ModelShape,
    op: str,
    make: LinearMaker,
    batches: Sequence[int] = BATCHES,
    form: GroupedFormat | None = None,
) -> Iterator[Space]:
    """Every weight of a model, in groups if there is a format, and every batch for which our kernel might be faster."""
    for name, sizes in model.projections.items():
        for rows in batches:
            shape = f"{model.name} {name}, {rows} rows"
            yield Space(f"{op}, {shape}", op, partial(_product, rows, sizes, make, form, Use()))
            if name == "down" and rows <= BATCHES[-1]:
                work = partial(_product, rows, sizes, make, form, GATED)
                yield Space(f"gated_{op}, {shape}", f"gated_{op}", work)


def _product(
    rows: int,
    sizes: tuple[int, int],
    make: LinearMaker,
    form: GroupedFormat | None,
    use: Use,
    device: torch.device,
) -> Work:
    out_size, in_size = sizes
    x = normal(rows, in_size * (use.activation.width if use.activation else 1), dtype=torch.bfloat16, device=device)
    calls: list[Callable[[], Tensor]] = []
    for _ in range(num_copies(2 * out_size * in_size)):
        weight: Tensor | GroupedWeight
        if form is None:
            weight = normal(out_size, in_size, dtype=torch.bfloat16, device=device)
        else:
            weight = random_groups(form, out_size, in_size, device)
        calls.append(partial(make(weight, None, use), x))
    kernel = kernel_config(rows, sizes, device, in_groups=form is not None)
    return Work([calls], calls[0], [asdict(kernel), asdict(NO_KERNEL)])


def decode_space(model: ModelShape, kv_dtype: torch.dtype, shapes: Shapes = DECODES) -> Space:
    """A large batch, which tests bandwidth, and one long context, which must be split among all processors."""
    return _attention_space("paged_decode", model, kv_dtype, shapes)


def prefill_space(model: ModelShape, kv_dtype: torch.dtype, shapes: Shapes = PREFILLS) -> Space:
    """A whole prompt, and a later chunk of a prompt."""
    return _attention_space("paged_prefill", model, kv_dtype, shapes)


def _attention_space(op: str, model: ModelShape, kv_dtype: torch.dtype, shapes: Shapes) -> Space:
    dtype = str(kv_dtype).removeprefix("torch.")
    return Space(f"{op}, {model.name}, {dtype} pages", op, partial(_attention, model, kv_dtype, shapes))


def _attention(model: ModelShape, kv_dtype: torch.dtype, shapes: Shapes, device: torch.device) -> Work:
    def inputs(batch: int, context: int, query_len: int) -> tuple[Tensor, PagedKV, AttentionPlan]:
        q = normal(batch * query_len, model.num_heads, model.head_dim, dtype=torch.bfloat16, device=device)
        pages = random_pages(model, batch, context, kv_dtype, device)
        return q, pages, attention_plan(batch, context, query_len, device)

    def copies(batch: int, context: int) -> int:
        return num_copies(2 * batch * context * model.num_kv_heads * model.head_dim * kv_dtype.itemsize)

    sets = [[inputs(*shape) for _ in range(copies(*shape[:2]))] for shape in shapes]
    return Work(
        [[partial(paged_attention_triton, *one) for one in alike] for alike in sets],
        lambda: paged_attention_triton(*sets[0][0]),
    )


def sampling_space(vocab: int, draws: int = DRAWS) -> Space:
    """A batch drawn with top-k and top-p, and a single greedy row."""
    return Space(f"sample_rows of {vocab}", "sample_rows", partial(_sampling, vocab, draws))


def _sampling(vocab: int, draws: int, device: torch.device) -> Work:
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

    return Work(calls, result)


def launch_space(model: ModelShape, rows: int = ROWS[0]) -> Space:
    """Short kernels of a decode step after each other, which programmatic dependent launch overlaps, or not."""
    return Space(f"dependent_launch, {model.name}", "dependent_launch", partial(_launches, model, rows))


def _launches(model: ModelShape, rows: int, device: torch.device) -> Work:
    weight = normal(model.hidden_size, dtype=torch.bfloat16, device=device)
    inputs, gate_ups = _copies(rows, model.hidden_size, device), _copies(rows, 2 * model.ffn_size, device)

    def call(x: Tensor, gate_up: Tensor) -> Tensor:
        activate_triton(gate_up, SWIGLU)
        return rms_norm_triton(x, weight, EPS)

    calls = [partial(call, *each) for each in zip(inputs, gate_ups, strict=False)]
    return Work([calls], calls[0], [asdict(OFF)])


def layer_spaces(model: ModelShape, rows: tuple[int, int] = ROWS) -> Iterator[Space]:
    yield Space(f"rms_norm, {model.name}", "rms_norm", partial(_norm, model.hidden_size, rows))
    yield Space(f"activate, {model.name}", "activate", partial(_activate, 2 * model.ffn_size, rows))
    yield Space(f"rope_and_store_kv, {model.name}", "rope_and_store_kv", partial(_rope, model, rows[0]))


def _norm(size: int, rows: Sequence[int], device: torch.device) -> Work:
    sets = [_copies(count, size, device) for count in rows]
    weight = normal(size, dtype=torch.bfloat16, device=device)
    calls = [[partial(rms_norm_triton, x, weight, EPS) for x in alike] for alike in sets]
    return Work(calls, calls[0][0])


def _activate(size: int, rows: Sequence[int], device: torch.device) -> Work:
    calls = [[partial(activate_triton, x, SWIGLU) for x in _copies(count, size, device)] for count in rows]
    return Work(calls, calls[0][0])


def _rope(model: ModelShape, rows: int, device: torch.device) -> Work:
    heads = [x.view(rows, -1, model.head_dim) for x in _copies(rows, model.qkv_size, device)]
    cos, sin = torch.rand(2, POSITIONS, model.head_dim // 2, device=device)
    positions = torch.randint(POSITIONS, (rows,), device=device)
    slots = torch.arange(rows, device=device)
    pages = random_pages(model, 1, rows, torch.bfloat16, device)
    calls = [partial(rope_and_store_kv_triton, x, cos, sin, slots, pages, None, positions) for x in heads]
    return Work([calls], calls[0])


def _copies(rows: int, width: int, device: torch.device) -> list[Tensor]:
    return [normal(rows, width, dtype=torch.bfloat16, device=device) for _ in range(num_copies(2 * rows * width))]
