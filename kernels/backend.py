"""Backends, each with one implementation of every op: those of plain torch and of the compiled module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from .adjust_logits import LogitAdjustments, adjust_logits, adjust_logits_native
from .embedding import Embedding, embedding, embedding_int8_native, embedding_wide
from .linear import (
    Linear,
    gated_linear,
    gated_linear_cpu,
    gated_linear_native,
    gated_linear_whole_native,
    head_whole_native,
    linear,
    linear_cpu,
    linear_whole_native,
)
from .linear_int4 import gated_linear_int4_native, head_int4_native, linear_int4_native
from .linear_int8 import (
    gated_linear_int8_native,
    head_int8_native,
    linear_int8_native,
)
from .linear_quantized import gated_linear_int8_weight_native, linear_int8_weight_native
from .paged import AttentionPlan, PagedKV
from .paged_attention import (
    is_read_in_place,
    paged_attention,
    paged_attention_cpu,
    paged_attention_native,
    plan_attention,
    plan_attention_cpu,
    plan_attention_native,
    plan_attention_one_order,
)
from .rms_norm import add, add_native, rms_norm, rms_norm_cpu, rms_norm_native
from .rope_and_store_kv import (
    HeadNorms,
    rope_and_store_kv,
    rope_and_store_kv_cpu,
    rope_and_store_kv_native,
)
from .row_sampling import SampledRows, SamplingRows, Verified, sample_rows
from .sample import Draws, likeliest_if_drawn, most_likely_allowed, sample
from .sample_cpu import (
    likeliest_if_drawn_native,
    most_likely_allowed_native,
    sample_cpu,
    sample_native,
)


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor: ...


class RopeAndStoreKV(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        kv: PagedKV,
        norms: HeadNorms | None = None,
        positions: Tensor | None = None,
    ) -> Tensor: ...


# Makes a product from a weight and a bias. The weight is a Tensor, or an Int4Weight if the backend `takes_int4`.
LinearMaker = Callable[[Any, Tensor | None], Linear]


@dataclass(frozen=True, slots=True)
class Backend:
    """The ops of one backend. The reference function of the same name is each op's contract.

    It is in the file of that name, except that `gated_linear` is beside `linear`, `add` beside `rms_norm`,
    `plan_attention` beside `paged_attention`, `likeliest_if_drawn` and `most_likely_allowed` beside `sample`, and
    `sample_rows` in row_sampling.py.

    embedding    its result has the dtype of the residual stream: the table's, or float32
    head         a `linear` whose product, the logits, is float32; None: `linear` serves as the head
    is_compiled  products run in the compiled module too, for the dtypes that it supports

    is_deterministic    a token's logits depend on the tokens before it alone, to the last bit: not on the batch, on how
                        the prompt was cut, or on what was cached

    looks_up_rotations  `rope_and_store_kv` is given tables of all positions, since computing a step's cosines and sines
                        would take kernels of their own
    """

    name: str
    embedding: Callable[[Tensor, Linear | None], Embedding]
    linear: LinearMaker
    gated_linear: LinearMaker
    rms_norm: RmsNorm
    add: Callable[[Tensor, Tensor], None]
    rope_and_store_kv: RopeAndStoreKV
    plan_attention: Callable[[np.ndarray, np.ndarray, np.ndarray, PagedKV, int | None], AttentionPlan]
    paged_attention: Callable[[Tensor, PagedKV, AttentionPlan], Tensor]
    adjust_logits: Callable[[Tensor, LogitAdjustments], None]
    sample: Callable[[Tensor, Draws], Tensor]
    likeliest_if_drawn: Callable[[Tensor, Draws], Tensor]
    most_likely_allowed: Callable[[Tensor, Tensor, Tensor], Tensor]
    sample_rows: Callable[[Tensor, Tensor, Tensor, SamplingRows, SampledRows, Verified | None], None]
    head: LinearMaker | None = None
    is_compiled: bool = False
    takes_int4: bool = False
    looks_up_rotations: bool = False
    is_deterministic: bool = False

    def can_record(self, kv: PagedKV) -> bool:
        """Whether a `Recorder` captures every op of a model with such pages, except embedding and rotation tables."""
        return self.is_compiled and is_read_in_place(kv)


REFERENCE = Backend(
    name="reference",
    embedding=embedding,
    linear=linear,
    gated_linear=gated_linear,
    rms_norm=rms_norm,
    add=add,
    rope_and_store_kv=rope_and_store_kv,
    plan_attention=plan_attention,
    paged_attention=paged_attention,
    adjust_logits=adjust_logits,
    sample=sample,
    likeliest_if_drawn=likeliest_if_drawn,
    most_likely_allowed=most_likely_allowed,
    sample_rows=sample_rows,
)

CPU = Backend(
    name="cpu",
    embedding=embedding,
    linear=linear_cpu,
    gated_linear=gated_linear_cpu,
    rms_norm=rms_norm_cpu,
    add=add,
    rope_and_store_kv=rope_and_store_kv_cpu,
    plan_attention=plan_attention_cpu,
    paged_attention=paged_attention_cpu,
    adjust_logits=adjust_logits,
    sample=sample_cpu,
    likeliest_if_drawn=likeliest_if_drawn,
    most_likely_allowed=most_likely_allowed,
    sample_rows=sample_rows,
)

NATIVE = Backend(
    name="native",
    embedding=embedding_wide,
    linear=linear_cpu,
    gated_linear=gated_linear_native,
    rms_norm=rms_norm_native,
    add=add_native,
    rope_and_store_kv=rope_and_store_kv_native,
    plan_attention=plan_attention_native,
    paged_attention=paged_attention_native,
    adjust_logits=adjust_logits_native,
    sample=sample_native,
    likeliest_if_drawn=likeliest_if_drawn_native,
    most_likely_allowed=most_likely_allowed_native,
    sample_rows=sample_rows,
)

NATIVE_WHOLE = replace(
    NATIVE,
    name="native-whole",
    linear=linear_whole_native,
    gated_linear=gated_linear_whole_native,
    head=head_whole_native,
    is_compiled=True,
)

NATIVE_INT8 = replace(
    NATIVE,
    name="native-int8",
    embedding=embedding_int8_native,
    linear=linear_int8_native,
    gated_linear=gated_linear_int8_native,
    head=head_int8_native,
    is_compiled=True,
)

NATIVE_INT4 = replace(
    NATIVE_INT8,
    name="native-int4",
    linear=linear_int4_native,
    gated_linear=gated_linear_int4_native,
    head=head_int4_native,
    takes_int4=True,
)

NATIVE_INT8_WEIGHT = replace(
    NATIVE,
    name="native-int8-weight",
    linear=linear_int8_weight_native,
    gated_linear=gated_linear_int8_weight_native,
    is_compiled=True,
)


def _deterministic(backend: Backend) -> Backend:
    """A compiled backend whose attention has one order too: its products do, and the other ops work row by row."""
    return replace(
        backend,
        name=f"{backend.name}-deterministic",
        plan_attention=plan_attention_one_order,
        is_deterministic=True,
    )


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        REFERENCE,
        CPU,
        NATIVE,
        NATIVE_WHOLE,
        NATIVE_INT8,
        NATIVE_INT8_WEIGHT,
        NATIVE_INT4,
        *map(_deterministic, (NATIVE_WHOLE, NATIVE_INT8, NATIVE_INT4)),
    )
}
