"""The backends of a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..adjust_logits import adjust_logits
from ..backend import Backend
from ..embedding import embedding
from ..rms_norm import add
from ..sample import likeliest_if_drawn, most_likely_allowed, sample
from .linear import gated_linear_triton, linear_triton
from .linear_fixed import Prepare, gated_linear_fixed_triton, linear_fixed_triton
from .linear_quantized import (
    gated_linear_fp8_weight_triton,
    gated_linear_int8_weight_triton,
    linear_fp8_weight_triton,
    linear_int8_weight_triton,
    to_fp8,
    to_int8,
)
from .paged_attention import paged_attention_triton, plan_attention_triton
from .paged_fixed import paged_attention_fixed_triton
from .product import Weight
from .rms_norm import rms_norm_triton
from .rope_and_store_kv import rope_and_store_kv_triton
from .row_sampling import sample_rows_triton

TRITON = Backend(
    name="triton",
    embedding=embedding,
    linear=linear_triton,
    gated_linear=gated_linear_triton,
    rms_norm=rms_norm_triton,
    add=add,
    rope_and_store_kv=rope_and_store_kv_triton,
    plan_attention=plan_attention_triton,
    paged_attention=paged_attention_triton,
    adjust_logits=adjust_logits,
    sample=sample,
    likeliest_if_drawn=likeliest_if_drawn,
    most_likely_allowed=most_likely_allowed,
    sample_rows=sample_rows_triton,
    looks_up_rotations=True,
)

TRITON_INT8 = replace(
    TRITON, name="triton-int8", linear=linear_int8_weight_triton, gated_linear=gated_linear_int8_weight_triton
)

TRITON_FP8 = replace(
    TRITON, name="triton-fp8", linear=linear_fp8_weight_triton, gated_linear=gated_linear_fp8_weight_triton
)


def _deterministic(backend: Backend, prepare: Prepare) -> Backend:
    """The backend with sums whose order no other row decides. All of its other ops compute each row by itself."""
    return replace(
        backend,
        name=f"{backend.name}-deterministic",
        linear=partial(linear_fixed_triton, prepare),
        gated_linear=partial(gated_linear_fixed_triton, prepare),
        paged_attention=paged_attention_fixed_triton,
        is_deterministic=True,
    )


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        TRITON,
        TRITON_INT8,
        TRITON_FP8,
        _deterministic(TRITON, Weight),
        _deterministic(TRITON_INT8, to_int8),
        _deterministic(TRITON_FP8, to_fp8),
    )
}
