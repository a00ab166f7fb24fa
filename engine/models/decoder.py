"""The parts that every family shares: a decoder's frame, its residual stream, attention and the feed-forward layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from ...kernels import GATED, AttentionPlan, Backend, HeadNorms, PagedKV
from .config import ConfigFile, ModelConfig
from .rope import Rope
from .weights import Weights

EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The packed tokens of several sequences, and everything else that a model needs to compute one step.

    token_ids, positions  [num_tokens] int64
    slots                 [num_tokens] int64, where each token's key and value are stored; -1: nowhere
    logit_rows            [num_logits] int64, the tokens after which the next one is wanted; None: all
    attention             which tokens see which slots: a plan for each sliding window in `ModelConfig.windows`
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor | None
    attention: Mapping[int | None, AttentionPlan]


class Embedded(NamedTuple):
    """The tensors that the layers start from.

    tokens          [num_tokens, hidden]
    cosines, sines  [num_tokens, head_dim / 2] float32, of the tokens' positions; or tables of all positions
    """

    tokens: Tensor
    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What each layer of a step is given. The fields are those of `Embedded` and `StepInputs`.

    positions  None unless cosines and sines are tables
    """

    cosines: Tensor
    sines: Tensor
    positions: Tensor | None
    slots: Tensor
    attention: Mapping[int | None, AttentionPlan]


class ResidualStream:
    """The sum that every layer reads from and adds to. A layer decides where its norms are by what it calls.

    The last addition waits, because `read_normalised` adds and normalises in one pass over memory.

    total  [num_tokens, hidden], changed in place
    """

    def __init__(self, total: Tensor, eps: float, ops: Backend) -> None:
        self._total, self._eps, self._ops = total, eps, ops
        self._waiting: Tensor | None = None

    def read(self) -> Tensor:
        """The stream as it is, to be read before the next `add`."""
        self._add_waiting()
        return self._total

    def read_normalised(self, norm: Tensor) -> Tensor:
        """A new tensor: the stream normalised by a weight [hidden], and in the weight's dtype."""
        if self._waiting is None:
            return self._ops.rms_norm(self._total, norm, self._eps)
        waiting, self._waiting = self._waiting, None
        return self._ops.rms_norm(waiting, norm, self._eps, self._total)

    def add(self, x: Tensor, norm: Tensor | None = None) -> None:
        """Adds x [num_tokens, hidden], normalised first if there is a weight for that."""
        self._add_waiting()
        self._waiting = x if norm is None else self._ops.rms_norm(x, norm, self._eps)

    def _add_waiting(self) -> None:
        if self._waiting is not None:
            self._ops.add(self._total, self._waiting)
            self._waiting = None


class Attention:
    """Rotary attention over the paged cache, with one product for queries, keys and values.

    prefix  the name of the attention in the checkpoint, as in model.layers.0.self_attn
    window  how many tokens a query sees at most, its own included; None: all
    norms   of queries and keys; None: there are none
    """

    def __init__(
        self, weights: Weights, prefix: str, config: ModelConfig, window: int | None, norms: HeadNorms | None = None
    ) -> None:
        self._ops, self._head_dim, self._window, self._norms = weights.ops, config.head_dim, window, norms
        hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
        rows = {f"{prefix}.q_proj": query, f"{prefix}.k_proj": kv, f"{prefix}.v_proj": kv}
        self._qkv = weights.linear(rows, hidden, config.qkv_bias)
        self._output = weights.linear({f"{prefix}.o_proj": hidden}, query, config.output_bias)

    def __call__(self, x: Tensor, step: LayerInputs, kv: PagedKV) -> Tensor:
        """x [num_tokens, hidden] to the same shape. Stores the tokens' keys and values."""
        qkv = self._qkv(x).view(len(x), -1, self._head_dim)
        q = self._ops.rope_and_store_kv(qkv, step.cosines, step.sines, step.slots, kv, self._norms, step.positions)
        return self._output(self._ops.paged_attention(q, kv, step.attention[self._window]).flatten(1))


class GatedMLP:
    """down(silu(gate(x)) · up(x)), with one product for gate and up (SwiGLU; Shazeer, 2020).

    prefix  the name of the feed-forward layer in the checkpoint, as in model.layers.0.mlp
    """

    def __init__(self, weights: Weights, prefix: str, config: ModelConfig) -> None:
        hidden, ffn = config.hidden_size, config.ffn_size
        self._gate_up = weights.linear({f"{prefix}.gate_proj": ffn, f"{prefix}.up_proj": ffn}, hidden, config.mlp_bias)
        self._down = weights.linear({f"{prefix}.down_proj": hidden}, ffn, config.mlp_bias, GATED)

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden] to the same shape."""
        return self._down(self._gate_up(x))


class Layer(Protocol):
    """A decoder layer: reads the stream, adds to it, and stores keys and values in its own pages."""

    def __call__(self, stream: ResidualStream, step: LayerInputs, kv: PagedKV) -> None: ...


class Decoder(ABC):
    """A family: embedding, layers, final norm and head. A subclass says what config.json means and makes the layers.

    architecture  the family's name in `architectures` of config.json
    model_type    its name in `model_type`
    """

    architecture: ClassVar[str]
    model_type: ClassVar[str]

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        ops = weights.ops
        self.config = config
        self._ops, self._dtype = ops, weights.dtype
        shape = config.vocab_size, config.hidden_size
        table = weights.whole(EMBEDDING, *shape)
        self._rope = Rope(config.rope, config.head_dim, table.device)
        self._head = weights.head("lm_head", *shape, tied_to=table if config.tie_word_embeddings else None)
        self._embedding = ops.embedding(table, self._head if config.tie_word_embeddings else None)
        del table  # where the backend has packed the table, there is no need for both
        self._layers = [
            self.make_layer(weights, f"model.layers.{number}", window) for number, window in enumerate(config.windows)
        ]
        self._final_norm = weights.norm("model.norm", config.hidden_size)
        self.weight_bytes = weights.num_bytes

    @classmethod
    @abstractmethod
    def configure(cls, file: ConfigFile) -> ModelConfig:
        """Reads config.json. Raises ConfigError for whatever this family does not support."""

    @abstractmethod
    def make_layer(self, weights: Weights, prefix: str, window: int | None) -> Layer:
        """Loads one layer, whose weights have names that begin with `prefix`."""

    def tabulate_rotations(self, num_positions: int) -> None:
        """Compute the cosines and sines of all positions, which steps look up. Else each step computes its own."""
        self._rope.tabulate(num_positions)

    def forward(self, inputs: StepInputs, cache: Sequence[PagedKV]) -> Tensor:
        """Logits [num_logits, vocab], in the weights' dtype or float32. Fills `cache`, the pages of each layer."""
        return self.logits(self.embed(inputs), inputs, cache)

    def embed(self, inputs: StepInputs) -> Embedded:
        """The part of `forward` that is never recorded, so it may call torch."""
        cosines, sines = self._rope.rotations(inputs.positions)
        return Embedded(self._embedding(inputs.token_ids), cosines, sines)

    def logits(self, embedded: Embedded, inputs: StepInputs, cache: Sequence[PagedKV]) -> Tensor:
        """The rest of `forward`. Calls ops of the backend only, if all rows are wanted. Changes `embedded.tokens`."""
        return self.head(self.hidden_states(embedded, inputs, cache), inputs.logit_rows)

    def hidden_states(self, embedded: Embedded, inputs: StepInputs, cache: Sequence[PagedKV]) -> Tensor:
        """[num_tokens, hidden], after the last norm. Fills `cache`, and changes `embedded.tokens`."""
        stream = ResidualStream(embedded.tokens, self.config.rms_norm_eps, self._ops)
        positions = inputs.positions if self._rope.has_tables else None
        step = LayerInputs(embedded.cosines, embedded.sines, positions, inputs.slots, inputs.attention)
        for layer, kv in zip(self._layers, cache, strict=True):
            layer(stream, step, kv)
        return stream.read_normalised(self._final_norm)

    def head(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits after these rows of the hidden states, or after all."""
        return self._head(hidden if rows is None else hidden.index_select(0, rows))
