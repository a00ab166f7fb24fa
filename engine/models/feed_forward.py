"""Feed-forward layers: dense ones, and those whose experts a router chooses for each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels import Activation, Use
from ..core.errors import ConfigError
from .adapted import AdaptedLinear
from .config import ExpertLayers, ModelConfig
from .share import WHOLE, Cut
from .tensors import Rows
from .weights import ExpertRows, Weights


class MLP:
    """down(activation(gate(x)) · up(x)), with one product for gate and up (SwiGLU, GeGLU; Shazeer, 2020).

    Without a gate it is down(activation(up(x))).

    name  of the feed-forward layer in the checkpoint, as in model.layers.0.mlp
    ffn   its width, if it is not that of the model's dense layers
    sums  whether its products are summed over ranks here; otherwise the caller does that
    """

    def __init__(self, weights: Weights, name: str, config: ModelConfig, ffn: int = 0, sums: bool = True) -> None:
        hidden, ffn, names = config.hidden_size, ffn or config.ffn_size, config.names
        factor = 1.0 if config.norms.mlp_behind else config.residual_scale
        down = Rows(f"{name}.{names.down}", hidden, factor=factor, is_transposed=config.is_transposed)
        cut = weights.columns([down], ffn, "columns of a feed-forward layer")
        self._sum = weights.share.sum if sums else WHOLE.sum
        parts = [(names.gate, ffn), (names.up, ffn)] if names.gate else [(names.up, ffn)]
        if names.gate_up and weights.has(Rows(f"{name}.{names.gate_up}", 2 * ffn)):  # GGUF files may have them apart
            parts = [(names.gate_up, 2 * ffn)]
        rows = [Rows(f"{name}.{part}", size, is_transposed=config.is_transposed) for part, size in parts]
        if not weights.share.is_whole:
            rows, down = [_columns_of_rank(each, cut) for each in rows], replace(down, columns=cut)
        self._up = AdaptedLinear(weights, rows, hidden, config.mlp_bias)
        parameters = _xielu(weights, f"{name}.act_fn") if config.activation == "xielu" else ()
        activation = Activation(config.activation, bool(names.gate or names.gate_up), parameters)
        self._down = AdaptedLinear(weights, [down], cut.size, config.mlp_bias, Use(activation))

    @property
    def adapted_products(self) -> Sequence[AdaptedLinear]:
        return self._up, self._down

    def __call__(self, x: Tensor, adapter_slots: Tensor | None) -> Tensor:
        """x [num_tokens, hidden] to the same shape. adapter_slots: see StepInputs."""
        return self._sum(self._down(self._up(x, adapter_slots), adapter_slots))


def _columns_of_rank(rows: Rows, cut: Cut) -> Rows:
    """The rows that make some columns of a feed-forward layer: of its gate, of its up, or of both in one tensor."""
    index = [cut.index(offset) for offset in range(0, rows.size, cut.whole)]
    return rows.taking(torch.cat(index))


def _xielu(weights: Weights, name: str) -> tuple[float, float]:
    """αₚ and αₙ, which are positive: the checkpoint has what softplus makes them of, and αₙ is above β."""
    positive, negative = weights.number(f"{name}.alpha_p", 1), weights.number(f"{name}.alpha_n", 1)
    beta = weights.number(f"{name}.beta")
    if beta != 0.5:
        raise ConfigError(f"tensor {name}.beta is {beta}; only 0.5 is supported")
    eps = weights.number(f"{name}.eps")
    if not math.isclose(eps, -1e-6, rel_tol=0.01):  # in bfloat16
        raise ConfigError(f"tensor {name}.eps is {eps}; only -1e-06 is supported")
    return math.log1p(math.exp(positive)), beta + math.log1p(math.exp(negative))


class ExpertMLP:
    """The sum of what the chosen experts of a token compute (Shazeer et al., 2017), each of them a gated MLP.

    name  of the layer in the checkpoint, as in model.layers.0
    """

    def __init__(self, weights: Weights, name: str, config: ModelConfig, experts: ExpertLayers) -> None:
        self._ops, self._routing, names = weights.ops, experts.routing, experts.names
        hidden, count = config.hidden_size, experts.routing.num_experts
        self._router = weights.router(Rows(f"{name}.{names.router}", count), hidden, experts.has_bias)
        self._correction: Tensor | None = None
        if names.correction:
            shape = *names.correction_shape, count
            self._correction = weights.numbers(f"{name}.{names.correction}", *shape).flatten()
        in_turn = torch.arange(2 * experts.ffn_size).view(-1, 2).T.flatten() if names.is_transposed else None
        parts = [_expert_rows(weights, name, config, experts, each, in_turn) for each in range(count)]
        self._sum = weights.share.sum
        cut = weights.columns([each.down for each in parts], experts.ffn_size, "columns of an expert")
        if not weights.share.is_whole:
            parts = [
                ExpertRows([_columns_of_rank(rows, cut) for rows in each.gate_up], replace(each.down, columns=cut))
                for each in parts
            ]
        limit = experts.limit
        use = Use(Activation("clamped_silu", parameters=(limit,)) if limit else Activation(config.activation))
        self._experts = weights.experts(parts, hidden, cut.size, experts.has_bias, use)
        self._shared = self._shared_gate = None
        if experts.shared_size:
            self._shared = MLP(weights, f"{name}.{names.shared}", config, experts.shared_size, sums=False)
        if names.shared_gate:
            self._shared_gate = weights.router(Rows(f"{name}.{names.shared_gate}", 1), hidden)

    @property
    def adapted_products(self) -> Sequence[AdaptedLinear]:
        return () if self._shared is None else self._shared.adapted_products

    def __call__(self, x: Tensor, adapter_slots: Tensor | None) -> Tensor:
        """x [num_tokens, hidden] to the same shape. adapter_slots: see StepInputs."""
        routes = self._ops.route(self._router(x), self._routing, self._correction)
        shared = None if self._shared is None else self._shared(x, adapter_slots)
        gates = None if self._shared_gate is None else self._shared_gate(x)
        return self._sum(self._experts(x, routes, shared, gates))


def _expert_rows(
    weights: Weights, layer: str, config: ModelConfig, experts: ExpertLayers, number: int, in_turn: Tensor | None
) -> ExpertRows:
    """An expert's own tensors, or its parts of those of all experts.

    in_turn  the order of gate and up where their rows lie in turn; all experts share it, as it can be large
    """
    names, hidden, ffn, factor = experts.names, config.hidden_size, experts.ffn_size, config.residual_scale
    whole = Rows("", 0, expert=number, is_bare=not names.has_suffix, is_transposed=names.is_transposed)
    fused = replace(whole, name=f"{layer}.{names.fused_gate_up}", size=2 * ffn, order=in_turn)
    if weights.has(fused):
        return ExpertRows([fused], replace(whole, name=f"{layer}.{names.fused_down}", size=hidden, factor=factor))
    gate_up = [Rows(f"{layer}.{name.format(number)}", ffn) for name in (names.gate, names.up)]
    return ExpertRows(gate_up, Rows(f"{layer}.{names.down.format(number)}", hidden, factor=factor))
