"""The weights of a model: read a few rows at a time, and turned at once into what computes.

Weights that the checkpoint holds in groups stay in groups if the backend takes them. Otherwise they are dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from ...checkpoints.stored import ROWS_TOGETHER
from ...kernels import (
    HEAD,
    INT4,
    PLAIN,
    ROUTER,
    Backend,
    Experts,
    ExpertWeights,
    GroupedFormat,
    GroupedWeight,
    Linear,
    Use,
)
from ..core.errors import ConfigError
from .share import WHOLE, Cut, Share
from .tensors import Rows, Tensors, Weight

ROUNDED_TOGETHER = 64  # inputs of a product in int8

Place = TypeVar("Place", bound=Weight)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Where the weights of one expert are: those of its gate and up, which are one product, and of its down."""

    gate_up: Sequence[Rows]
    down: Rows


class Weights:
    """Makes the parts of a model from tensors, by the names that they have in a checkpoint without .weight or .bias.

    packs      round to 4 bits what the checkpoint holds whole, except embedding, head and routers
    share      the part of the model that is wanted
    num_bytes  of the weights so far, as they were loaded: a backend may pack them more densely
    """

    def __init__(
        self,
        tensors: Tensors,
        ops: Backend,
        device: torch.device,
        dtype: torch.dtype,
        packs: bool = False,
        share: Share = WHOLE,
    ) -> None:
        self.ops, self.dtype, self.share = ops, dtype, share
        self.device = torch.empty(0, device=device).device  # with its index, as tensors have it
        self.num_bytes = 0
        self._tensors, self._packs = tensors, packs and ops.keeps(INT4)

    def norm(self, rows: Rows) -> Tensor:
        """The weight of a norm, [size]."""
        return self._filled(self._empty(rows.size), [rows], "weight")

    def norm_bias(self, rows: Rows) -> Tensor:
        """The bias of a norm, [size]."""
        return self._filled(self._empty(rows.size), [replace(rows, offset=0.0)], "bias")

    def number(self, name: str, *shape: int) -> float:
        """A tensor of one number, [] or [1] as `shape` says."""
        place = torch.empty(shape)
        self._tensors.fill(place, name, Rows(name, 1))
        return place.item()

    def ones(self, size: int) -> Tensor:
        """The weight of a norm that has none."""
        return self._empty(size).fill_(1.0)

    def bias(self, rows: Sequence[Rows]) -> Tensor:
        """The biases of products with the same input, [out]. Where ranks sum their products, one of them adds it."""
        found = self._filled(self._empty(sum(each.size for each in rows)), rows, "bias")
        if (columns := rows[0].columns) is not None and columns.start:
            found.zero_()
        return found

    def bias_once(self, rows: Sequence[Rows]) -> Tensor:
        """Read biases that are needed only while the model is loaded, so `num_bytes` does not count them."""
        num_bytes = self.num_bytes
        found = self.bias(rows)
        self.num_bytes = num_bytes
        return found

    def linear(self, rows: Sequence[Rows], in_size: int, has_bias: bool = False, use: Use = PLAIN) -> Linear:
        """One product in place of several with the same input: their outputs are stacked in this order."""
        bias = self.bias(rows) if has_bias else None
        return self.ops.linear(self._stacked(rows, in_size), bias, use)

    def router(self, rows: Rows, in_size: int, has_bias: bool = False) -> Linear:
        """A product that is never quantized: its errors would change which experts are chosen."""
        bias = self.bias([rows]) if has_bias else None
        return self.ops.linear(self.whole(rows, in_size), bias, ROUTER)

    def numbers(self, name: str, *shape: int) -> Tensor:
        """A tensor by its whole name, in float32."""
        place = torch.empty(shape, device=self.device)
        return self._filled(place, [Rows(name, shape[0], is_bare=True)], "weight")

    def experts(self, parts: Sequence[ExpertRows], in_size: int, ffn_size: int, has_bias: bool, use: Use) -> Experts:
        """The products of experts, which are loaded and packed one by one."""

        def weight(rows: Sequence[Rows], in_size: int, form: GroupedFormat | None) -> tuple[Weight, Tensor | None]:
            bias = self.bias(rows) if has_bias else None
            return self._together(rows, in_size, form), bias

        first = self._common([rows for each in parts for rows in each.gate_up], in_size)
        second = self._common([each.down for each in parts], ffn_size)
        weights = (
            ExpertWeights(*weight(each.gate_up, in_size, first), *weight([each.down], ffn_size, second))
            for each in parts
        )
        return self.ops.experts(weights, len(parts), use)

    def has(self, rows: Rows) -> bool:
        return self._tensors.has(rows.tensor_name("weight"))

    def columns(self, rows: Sequence[Rows], in_size: int, name: str) -> Cut:
        """The rank's inputs of some products [out, in_size], which part no group of inputs that share a scale.

        Parts are equal where they are then a multiple of 64 inputs, which products in int8 round together.

        name  of what the inputs are, in the plural

        Raises ConfigError if there are too few.
        """
        form, count = self._common(rows, in_size), self.share.count
        together = ROUNDED_TOGETHER if form is None else math.lcm(ROUNDED_TOGETHER, form.group)
        if form is None or in_size % (together * count) == 0:
            return self.share.of(in_size, name)
        num_groups = in_size // form.group
        if num_groups < count:
            raise ConfigError(
                f"--tensor-parallel {count}: tensor {rows[0].name}.weight has {num_groups} groups of {form.group}"
                " inputs that share a scale, fewer than ranks; --quantization int8 and none cut anywhere"
            )
        return self.share.of(num_groups, name).times(form.group)

    def table(self, rows: Rows, in_size: int, is_multiplied: bool) -> Weight:
        """A matrix [size, in_size], in groups if the backend takes that. `is_multiplied`: it is the head, too."""
        if is_multiplied and not self.ops.packs_head_apart:
            return self._together([rows], in_size, self._kept(rows))
        form = self._tensors.format_of(rows.tensor_name("weight"))
        if form is not None and self.ops.looks_up(form):
            self._check_groups([rows], in_size, form)
            return self._filled(GroupedWeight.allocate(form, rows.size, in_size, self.device), [rows], "weight")
        return self._filled(self._empty(rows.size, in_size), [rows], "weight")

    def whole(self, rows: Rows, in_size: int) -> Tensor:
        """A matrix [size, in_size], never in groups."""
        return self._filled(self._empty(rows.size, in_size), [rows], "weight")

    def head(self, rows: Rows, hidden_size: int, has_bias: bool, tied_to: tuple[Rows, Weight] | None) -> Linear:
        """The product that gives the logits. `tied_to`: where its weight is, and the embedding, if it is that."""
        of_weight, table = tied_to or (rows, None)
        if table is None or self.ops.packs_head_apart:
            table = self._together([of_weight], hidden_size, self._kept(of_weight))
        bias = self.bias([rows]) if has_bias else None
        return self.ops.linear(table, bias, HEAD)

    def _stacked(self, rows: Sequence[Rows], in_size: int) -> list[Weight]:
        """Neighbours in the same format together: in groups if the backend keeps that, else whole."""
        parts = groupby(rows, lambda each: self._multiplied(each, in_size))
        return [self._together(list(part), in_size, form) for form, part in parts]

    def _common(self, rows: Sequence[Rows], in_size: int) -> GroupedFormat | None:
        """The format that all rows can be kept in together."""
        first, *others = {self._multiplied(each, in_size) for each in rows}
        return None if others else first

    def _multiplied(self, rows: Rows, in_size: int) -> GroupedFormat | None:
        """The format of a product's weight: the checkpoint's, or the one that it is rounded to."""
        form = self._kept(rows)
        return INT4 if form is None and self._packs and in_size % INT4.group == 0 else form

    def _kept(self, rows: Rows) -> GroupedFormat | None:
        form = self._tensors.format_of(rows.tensor_name("weight"))
        return form if self.ops.keeps(form) else None

    def _together(self, rows: Sequence[Rows], in_size: int, form: GroupedFormat | None) -> Weight:
        if form is not None:
            self._check_groups(rows, in_size, form)
        out_size = sum(each.size for each in rows)
        are_together = not any(each.size % ROWS_TOGETHER for each in rows[:-1])
        if are_together and (place := self.ops.place(form, out_size, in_size)):
            return self._filled(place, rows, "weight")
        if form is None:
            return self._filled(self._empty(out_size, in_size), rows, "weight")
        return self._filled(GroupedWeight.allocate(form, out_size, in_size, self.device), rows, "weight")

    def _check_groups(self, rows: Sequence[Rows], in_size: int, form: GroupedFormat) -> None:
        """Raise ConfigError if a group of inputs that share a scale would be cut."""
        for each in rows:
            if (cut := each.columns) is not None and (cut.start % form.group or cut.stop % form.group):
                raise ConfigError(
                    f"--tensor-parallel {self.share.count}: inputs {cut.start} to {cut.stop} of tensor"
                    f" {each.name}.weight would cut a group of {form.group} that share a scale;"
                    " --quantization int8 and none cut anywhere"
                )
        if in_size % form.group:
            raise ConfigError(
                f"tensor {rows[0].name}.weight is in {form.bits} bits, of which {form.group} inputs share a"
                f" scale, but config.json gives it {in_size} inputs: not a multiple of {form.group}"
            )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def _filled(self, place: Place, rows: Sequence[Rows], kind: str) -> Place:
        for each, part in zip(rows, place.split([each.size for each in rows]), strict=True):
            self._tensors.fill(part, each.tensor_name(kind), each)
        self.num_bytes += place.nbytes
        return place
