"""Backends, each with one implementation of every op: those of plain torch and of the compiled module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from .activate import Activation
from .adjust_logits import LogitAdjustments, adjust_logits, adjust_logits_native
from .cap import cap, cap_native
from .embedding import EmbeddingMaker, embedding, embedding_native
from .experts import Experts, ExpertsMaker, ExpertWeights, experts, experts_native
from .grouped_weight import GroupedFormat
from .linear import PLAIN, Linear, LinearMaker, Use, is_compiled_whole, linear, linear_cpu, linear_native, stacked
from .linear_grouped import PackedGroups, linear_grouped, linear_grouped_native, multiplies_all, multiplies_native
from .linear_int8 import PackedInt8, linear_int8, linear_int8_native
from .linear_quantized import (
    linear_fp8_weight,
    linear_grouped_weight,
    linear_int8_weight,
    linear_int8_weight_native,
    packed_int8_weight,
)
from .low_rank import AddressBank, BankShape, LowRankBank, add_low_rank, add_low_rank_native
from .paged import PLAIN_SCORING, AttentionPlan, PagedKV, Scoring
from .paged_attention import (
    is_read_in_place,
    paged_attention,
    paged_attention_cpu,
    paged_attention_native,
    plan_attention,
    plan_attention_cpu,
    plan_attention_native,
)
from .rms_norm import add, add_native, layer_norm, layer_norm_native, rms_norm, rms_norm_cpu, rms_norm_native
from .rope_and_store_kv import HeadNorms, rope_and_store_kv, rope_and_store_kv_cpu, rope_and_store_kv_native
from .route import Routes, Routing, route, route_native
from .row_sampling import SampledRows, SamplingRows, Verified, sample_rows
from .sample import Draws, likeliest_if_drawn, most_likely_allowed, sample
from .sample_cpu import (
    likeliest_if_drawn_native,
    most_likely_allowed_native,
    sample_cpu,
    sample_native,
)

UNQUANTIZED = "unquantized"  # the format of a weight that keeps the dtype of the model


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor: ...


class LayerNorm(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> Tensor: ...


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
        centre: Tensor | None = None,
    ) -> Tensor: ...


class PlanAttention(Protocol):
    def __call__(
        self,
        query_start: np.ndarray,
        context_len: np.ndarray,
        block_table: np.ndarray,
        kv: PagedKV,
        sliding_window: int | None,
        one_order: bool = False,
    ) -> AttentionPlan: ...


class PagedAttention(Protocol):
    def __call__(self, q: Tensor, kv: PagedKV, plan: AttentionPlan, scoring: Scoring = PLAIN_SCORING) -> Tensor: ...


class AddLowRank(Protocol):
    def __call__(
        self, out: Tensor, x: Tensor, slots: Tensor, bank: Any, activation: Activation | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """The ops of one device. The reference function of the same name is each op's contract.

    It is in the file of that name, except that `add` and `layer_norm` are beside `rms_norm`, `add_low_rank` in
    low_rank.py, `plan_attention` beside `paged_attention`, `likeliest_if_drawn` and `most_likely_allowed` beside
    `sample`, and `sample_rows` in row_sampling.py.

    embedding    its result has the dtype of the residual stream: the table's, the model's, or float32
    makers       make the products of weights in each format; REFERENCE has all formats
    multiplies   whether the device multiplies weights in groups of this format
    join         makes an expert layer of products in each format; its reference is `experts`
    places       make the weights that are packed while they are read, of each format that has any
    bank         makes what `add_low_rank` reads a product's adapters from
    packs_groups makes such weights in groups of a format that is multiplied; None: there are none
    is_compiled  every op runs in the compiled module, except products that torch computes faster

    weights           the format that a model's matrices get, except those that `keeps` names. int4 makes int8 of these,
                      and groups leaves them as the checkpoint has them; its activations are not rounded
    is_deterministic  a token's logits depend on the tokens before it alone, to the last bit: not on the batch, on how
                      the prompt was cut, or on what was cached

    looks_up_rotations  `rope_and_store_kv` is given tables of all positions, since computing a step's cosines and sines
                        would take kernels of their own
    """

    name: str
    embedding: EmbeddingMaker
    makers: Mapping[str, LinearMaker]
    rms_norm: RmsNorm
    layer_norm: LayerNorm
    add: Callable[[Tensor, Tensor], None]
    cap: Callable[[Tensor, float], None]
    rope_and_store_kv: RopeAndStoreKV
    plan_attention: PlanAttention
    paged_attention: PagedAttention
    route: Callable[[Tensor, Routing, Tensor | None], Routes]
    join: ExpertsMaker
    adjust_logits: Callable[[Tensor, LogitAdjustments], None]
    sample: Callable[[Tensor, Draws], Tensor]
    likeliest_if_drawn: Callable[[Tensor, Draws], Tensor]
    most_likely_allowed: Callable[[Tensor, Tensor, Tensor], Tensor]
    sample_rows: Callable[[Tensor, Tensor, Tensor, SamplingRows, SampledRows, Verified | None], None]
    add_low_rank: AddLowRank = add_low_rank
    bank: Callable[[BankShape], LowRankBank] = AddressBank
    multiplies: Callable[[GroupedFormat], bool] = multiplies_all
    places: Mapping[str, Callable[[int, int], PackedInt8]] = field(default_factory=dict)
    packs_groups: Callable[[GroupedFormat, int, int], PackedGroups] | None = None
    is_compiled: bool = False
    looks_up_rotations: bool = False
    weights: str = UNQUANTIZED
    is_deterministic: bool = False

    def __str__(self) -> str:
        """The name, then what differs from the default: `native-int8-deterministic`."""
        weights = () if self.weights == UNQUANTIZED else (self.weights,)
        return "-".join((self.name, *weights, *(("deterministic",) if self.is_deterministic else ())))

    def keeps(self, form: GroupedFormat | None) -> bool:
        """Whether `linear` takes a `GroupedWeight` of this format; None: a weight that is not in groups."""
        if form is None or not self.multiplies(form):
            return False
        return self.weights == "groups" or self.weights == ("fp8" if form.is_float else "int4")

    def looks_up(self, form: GroupedFormat | None) -> bool:
        """Whether `embedding` takes a table of this format that is not the head too, where weights lose bits at all."""
        return form is not None and self.weights != UNQUANTIZED and self.multiplies(form)

    @property
    def packs_head_apart(self) -> bool:
        """Whether a head that is the embedding too is packed apart from it, because packed rows are not looked up."""
        return self.weights == "int8-weight" and self.weights in self.places

    def place(self, form: GroupedFormat | None, out_size: int, in_size: int) -> PackedGroups | PackedInt8 | None:
        """Where a product's weight gets this backend's format while it is read; None: `linear` takes it as it is read.

        form  of a weight that `keeps` takes; None: it is not in groups
        """
        if form is not None:
            return None if self.packs_groups is None else self.packs_groups(form, out_size, in_size)
        allocate = self.places.get(self.weights)
        return None if allocate is None else allocate(out_size, in_size)

    def linear(self, weight: Any, bias: Tensor | None, use: Use = PLAIN) -> Linear:
        """Make a product with a weight, which gets this backend's format, or with a list of them that are stacked.

        The weight of a router stays unquantized.
        """
        make = self.makers[UNQUANTIZED if use.is_router else self.weights]
        use = replace(use, is_deterministic=self.is_deterministic)
        if not isinstance(weight, list):
            return make(weight, bias, use)
        sizes = [part.shape[0] for part in weight]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return stacked([make(part, of_part, use) for part, of_part in zip(weight, biases, strict=True)])

    def experts(self, weights: Iterable[ExpertWeights], count: int, use: Use) -> Experts:
        """Make an expert layer, whose weights get this backend's format."""
        use = replace(use, is_deterministic=self.is_deterministic)
        return self.join(self.makers[self.weights], weights, count, use)

    def can_record(self, kv: PagedKV) -> bool:
        """Whether a `Recorder` captures every op of a model with such pages, except embedding and rotation tables."""
        use = Use(is_deterministic=self.is_deterministic)
        is_compiled = self.is_compiled and (self.weights != UNQUANTIZED or is_compiled_whole(use))
        return is_compiled and is_read_in_place(kv)


REFERENCE = Backend(
    name="reference",
    embedding=embedding,
    makers={
        UNQUANTIZED: linear,
        "int8": linear_int8,
        "int8-weight": linear_int8_weight,
        "int4": linear_grouped,
        "groups": linear_grouped_weight,
        "fp8": linear_fp8_weight,
    },
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    add=add,
    cap=cap,
    rope_and_store_kv=rope_and_store_kv,
    plan_attention=plan_attention,
    paged_attention=paged_attention,
    route=route,
    join=experts,
    adjust_logits=adjust_logits,
    sample=sample,
    likeliest_if_drawn=likeliest_if_drawn,
    most_likely_allowed=most_likely_allowed,
    sample_rows=sample_rows,
)

CPU = Backend(
    name="cpu",
    embedding=embedding,
    makers={UNQUANTIZED: linear_cpu},
    rms_norm=rms_norm_cpu,
    layer_norm=layer_norm,
    add=add,
    cap=cap,
    rope_and_store_kv=rope_and_store_kv_cpu,
    plan_attention=plan_attention_cpu,
    paged_attention=paged_attention_cpu,
    route=route,
    join=experts,
    adjust_logits=adjust_logits,
    sample=sample_cpu,
    likeliest_if_drawn=likeliest_if_drawn,
    most_likely_allowed=most_likely_allowed,
    sample_rows=sample_rows,
)

NATIVE = Backend(
    name="native",
    embedding=embedding_native,
    makers={
        UNQUANTIZED: linear_native,
        "int8": linear_int8_native,
        "int8-weight": linear_int8_weight_native,
        "int4": linear_grouped_native,
    },
    rms_norm=rms_norm_native,
    layer_norm=layer_norm_native,
    add=add_native,
    cap=cap_native,
    rope_and_store_kv=rope_and_store_kv_native,
    plan_attention=plan_attention_native,
    paged_attention=paged_attention_native,
    route=route_native,
    join=experts_native,
    adjust_logits=adjust_logits_native,
    sample=sample_native,
    likeliest_if_drawn=likeliest_if_drawn_native,
    most_likely_allowed=most_likely_allowed_native,
    sample_rows=sample_rows,
    add_low_rank=add_low_rank_native,
    multiplies=multiplies_native,
    places={"int8": PackedInt8.allocate, "int4": PackedInt8.allocate, "int8-weight": packed_int8_weight},
    packs_groups=PackedGroups.allocate,
    is_compiled=True,
)
