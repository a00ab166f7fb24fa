"""The backend of a GPU."""

from __future__ import annotations

from ..adjust_logits import adjust_logits
from ..backend import UNQUANTIZED, Backend
from ..cap import cap
from ..rms_norm import add
from ..route import route
from ..sample import likeliest_if_drawn, most_likely_allowed, sample
from .embedding import embedding_triton
from .experts import experts_triton
from .linear import (
    linear_fp8_weight_triton,
    linear_grouped_triton,
    linear_int8_weight_triton,
    linear_triton,
    multiplies,
)
from .low_rank import TritonBank, add_low_rank_triton
from .paged_attention import paged_attention_triton, plan_attention_triton
from .rms_norm import layer_norm_triton, rms_norm_triton
from .rope_and_store_kv import rope_and_store_kv_triton
from .row_sampling import sample_rows_triton

TRITON = Backend(
    name="triton",
    embedding=embedding_triton,
    makers={
        UNQUANTIZED: linear_triton,
        "int8-weight": linear_int8_weight_triton,
        "fp8": linear_fp8_weight_triton,
        "groups": linear_grouped_triton,
    },
    rms_norm=rms_norm_triton,
    layer_norm=layer_norm_triton,
    add=add,
    cap=cap,
    rope_and_store_kv=rope_and_store_kv_triton,
    plan_attention=plan_attention_triton,
    paged_attention=paged_attention_triton,
    route=route,
    join=experts_triton,
    adjust_logits=adjust_logits,
    sample=sample,
    likeliest_if_drawn=likeliest_if_drawn,
    most_likely_allowed=most_likely_allowed,
    sample_rows=sample_rows_triton,
    add_low_rank=add_low_rank_triton,
    bank=TritonBank,
    multiplies=multiplies,
    looks_up_rotations=True,
)
