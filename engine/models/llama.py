"""Llama (Touvron et al., 2023), Mistral (Jiang et al., 2023), and all that differs from them only by configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from pagoda_server.engine.models.config import ConfigFile, ModelConfig, read_llama_like
from pagoda_server.engine.models.inputs import StepInputs
from pagoda_server.engine.models.parameters import LayerParameters, Parameters
from pagoda_server.engine.models.rope import Rope
from pagoda_server.kernels import Backend, HeadNorms, Linear, PagedKV

# What transformers assumes where config.json is silent.
MISTRAL_SLIDING_WINDOW = 4096


def configure_llama(file: ConfigFile) -> ModelConfig:
    attention_bias = file.flag("attention_bias", False)
    return replace(
        read_llama_like(file, "llama"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=file.flag("mlp_bias", False),
    )


def configure_mistral(file: ConfigFile) -> ModelConfig:
    return replace(
        read_llama_like(file, "mistral"),
        sliding_window=file.optional_size("sliding_window", absent=MISTRAL_SLIDING_WINDOW),
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer, ready to run."""

    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    output: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear

    @staticmethod
    def prepare(weights: LayerParameters, config: ModelConfig, ops: Backend) -> Layer:
        head_norms = None
        if weights.query_norm is not None and weights.key_norm is not None:
            head_norms = HeadNorms(weights.query_norm, weights.key_norm, config.rms_norm_eps)
        return Layer(
            input_norm=weights.input_norm,
            qkv=ops.linear(weights.qkv_weight, weights.qkv_bias),
            head_norms=head_norms,
            output=ops.linear(weights.output_weight, weights.output_bias),
            post_attention_norm=weights.post_attention_norm,
            gate_up=ops.linear(weights.gate_up_weight, weights.gate_up_bias),
            down=ops.gated_linear(weights.down_weight, weights.down_bias),
        )


class Embedded(NamedTuple):
    """What the layers start from.

    tokens          [num_tokens, hidden]
    cosines, sines  [num_tokens, head_dim / 2] float32, of the tokens' positions
    """

    tokens: Tensor
    cosines: Tensor
    sines: Tensor


class Llama:
    """A decoder over a paged KV cache. Takes over `parameters`, whose layers it releases one by one."""

    def __init__(self, config: ModelConfig, parameters: Parameters, ops: Backend) -> None:
        self.config = config
        self.weight_bytes = parameters.num_bytes
        self._ops = ops
        self._rope = Rope(config.rope, config.head_dim, parameters.embedding.device)
        self._layers: list[Layer] = []
        while parameters.layers:
            self._layers.append(Layer.prepare(parameters.layers.pop(0), config, ops))
        self._final_norm = parameters.final_norm
        self._head = (ops.head or ops.linear)(parameters.head, None)
        self._embedding = ops.embedding(parameters.embedding, self._head if config.tie_word_embeddings else None)

    def forward(self, inputs: StepInputs, cache: Sequence[PagedKV]) -> Tensor:
        """Logits [num_logits, vocab], in the weights' dtype or float32; fills `cache`, a PagedKV a layer."""
        return self.logits(self.embed(inputs), inputs, cache)

    def embed(self, inputs: StepInputs) -> Embedded:
        cosines, sines = self._rope.rotations(inputs.positions)
        return Embedded(self._embedding(inputs.token_ids), cosines, sines)

    def logits(self, embedded: Embedded, inputs: StepInputs, cache: Sequence[PagedKV]) -> Tensor:
        """The rest of `forward`: ops of the backend alone if all rows are wanted. Changes `embedded.tokens`."""
        ops, eps = self._ops, self.config.rms_norm_eps
        residual, cosines, sines = embedded
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for layer, kv, next_norm in zip(self._layers, cache, norms, strict=True):
            x = self._attend(layer, x, (cosines, sines), inputs, kv)
            x = ops.rms_norm(x, layer.post_attention_norm, eps, residual)
            x = layer.down(layer.gate_up(x))
            x = ops.rms_norm(x, next_norm, eps, residual)
        return self._head(x if inputs.logit_rows is None else x.index_select(0, inputs.logit_rows))

    def _attend(
        self, layer: Layer, x: Tensor, rotations: tuple[Tensor, Tensor], inputs: StepInputs, kv: PagedKV
    ) -> Tensor:
        qkv = layer.qkv(x).view(x.shape[0], -1, self.config.head_dim)
        q = self._ops.rope_and_store_kv(qkv, *rotations, inputs.slots, kv, layer.head_norms)
        return layer.output(self._ops.paged_attention(q, kv, inputs.attention).flatten(1))
