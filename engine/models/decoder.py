"""A decoder, described by data: its frame, its residual stream, its layers, and what is folded into weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels import AttentionPlan, Backend, HeadNorms, PagedKV, Scoring
from .adapted import AdaptedLinear
from .config import ModelConfig
from .feed_forward import MLP, ExpertMLP
from .rope import Rope, RopeConfig, rotary_order
from .share import WHOLE, Cut, Share
from .tensors import Rows
from .weights import Weights

# Over more positions, the biases of fewer dimensions have a mean. Any number from 1,000 to 32,768 serves well.
CENTRED_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What a step gives to the layers that share block tables.

    slots      [num_tokens] int64, where each token's key and value are stored; -1: nowhere
    attention  which tokens see which slots: a plan for each sliding window of these layers
    """

    slots: Tensor
    attention: Mapping[int | None, AttentionPlan]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The packed tokens of several sequences, and everything else that a model needs to compute one step.

    token_ids, positions  [num_tokens] int64
    logit_rows            [num_logits] int64, the tokens after which the next one is wanted; None: all
    groups                what differs between the groups of layers
    group_of              each layer's group
    adapter_slots         [num_tokens] int32, the place of each token's adapter, or -1; None: no token has one
    """

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor | None
    groups: Sequence[GroupInputs]
    group_of: Sequence[int]
    adapter_slots: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines, each [num_tokens, head_dim / 2] float32, of the tokens' positions; or tables of all."""

    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True, slots=True)
class Embedded:
    """The tensors that the layers start from.

    tokens     [num_tokens, hidden]
    rotations  one for each of the model's ways to rotate
    """

    tokens: Tensor
    rotations: tuple[Rotation, ...]

    def first(self, count: int) -> Embedded:
        """Those of the first tokens, which share memory with these."""
        rotations = tuple(Rotation(each.cosines[:count], each.sines[:count]) for each in self.rotations)
        return Embedded(self.tokens[:count], rotations)

    def copy_(self, other: Embedded) -> None:
        """Take over what another one of as many tokens holds."""
        self.tokens.copy_(other.tokens)
        for ours, theirs in zip(self.rotations, other.rotations, strict=True):
            ours.cosines.copy_(theirs.cosines)
            ours.sines.copy_(theirs.sines)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What each layer of a group is given. The fields are those of `Embedded`, `StepInputs` and `GroupInputs`.

    positions  None unless the rotations are tables
    """

    rotations: tuple[Rotation, ...]
    positions: Tensor | None
    slots: Tensor
    attention: Mapping[int | None, AttentionPlan]
    adapter_slots: Tensor | None


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the backend with its weights.

    weight, bias      [hidden]; there may be no bias
    subtracts_mean    it is a `layer_norm`, otherwise an `rms_norm`, which has no bias
    """

    ops: Backend
    weight: Tensor
    eps: float
    bias: Tensor | None = None
    subtracts_mean: bool = False

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [num_tokens, hidden] normalised: a new tensor in the weight's dtype. As `rms_norm` treats a residual."""
        if self.subtracts_mean:
            return self.ops.layer_norm(x, self.weight, self.bias, self.eps, residual)
        return self.ops.rms_norm(x, self.weight, self.eps, residual)


class ResidualStream:
    """The sum that every layer reads from and adds to. A layer decides where its norms are by what it calls.

    The last addition waits, because a norm adds and normalises in one pass over memory.

    total  [num_tokens, hidden], changed in place
    """

    def __init__(self, total: Tensor, ops: Backend) -> None:
        self._total, self._ops = total, ops
        self._waiting: Tensor | None = None

    def read(self, norm: Norm | None = None) -> Tensor:
        """The stream normalised: a new tensor, in the dtype of the norm's weight.

        Without a norm it is the stream itself, to be read before the next `add`.
        """
        if norm is None:
            self._add_waiting()
            return self._total
        if self._waiting is None:
            return norm(self._total)
        waiting, self._waiting = self._waiting, None
        return norm(waiting, self._total)

    def add(self, x: Tensor, norm: Norm | None = None) -> None:
        """Adds x [num_tokens, hidden], normalised first if there is a norm for that."""
        self._add_waiting()
        self._waiting = x if norm is None else norm(x)

    def _add_waiting(self) -> None:
        if self._waiting is not None:
            self._ops.add(self._total, self._waiting)
            self._waiting = None


def attention_share(config: ModelConfig, share: Share) -> Share:
    """The part of each attention that a rank has: all of it where one norm needs all heads of a token."""
    return WHOLE if config.head_norms == "all" else share


class Attention:
    """Rotary attention over the paged cache, with one product for queries, keys and values.

    name      of the attention in the checkpoint, as in model.layers.0.self_attn
    window    how many tokens a query sees at most, its own included; None: all
    rope      how the checkpoint rotates its heads
    rotation  which of the step's rotations that is
    """

    def __init__(
        self, weights: Weights, name: str, config: ModelConfig, window: int | None, rope: RopeConfig, rotation: int
    ) -> None:
        self._ops, self._head_dim, self._window, self._rotation = weights.ops, config.head_dim, window, rotation
        order = rotary_order(config.head_dim, rope.rotary_dim(config.head_dim), config.is_interleaved)
        # Kernels divide scores by √head_dim: another scale is folded into what makes the queries.
        scale = 1.0 if config.score_scale is None else config.score_scale * math.sqrt(config.head_dim)
        share = attention_share(config, weights.share)
        self._sum = share.sum
        heads, kv_heads = share.heads(config.num_heads, config.num_kv_heads)
        self._norms = _head_norms(weights, name, config, order, scale) if config.head_norms else None
        self._query_norm: Norm | None = None
        if config.head_norms_behind:
            self._norms, self._query_norm = _head_norms_behind(weights, name, config, scale)
        hidden, query = config.hidden_size, heads.times(config.head_dim)
        rows = _query_key_value(name, config, order, 1.0 if self._norms else scale)
        if not share.is_whole:
            rows = _of_rank(rows, query, kv_heads.times(config.head_dim))
        self._qkv = AdaptedLinear(weights, rows, hidden, config.qkv_bias)
        output = Rows(
            f"{name}.{config.names.output}",
            hidden,
            factor=1.0 if config.norms.attention_behind else config.residual_scale,
            is_transposed=config.is_transposed,
            columns=None if share.is_whole else query,
        )
        self._output = AdaptedLinear(weights, [output], query.size, config.output_bias)
        sinks = weights.numbers(f"{name}.sinks", config.num_heads) if config.has_sinks else None
        self._scoring = Scoring(config.score_cap, None if sinks is None else sinks[heads.start : heads.stop])
        has_centre = config.qkv_bias and self._norms is None and self._scoring.is_plain
        own = replace(config, num_heads=heads.size, num_kv_heads=kv_heads.size)
        self._centre = _key_centre(weights.bias_once(rows), own, rope) if has_centre else None

    @property
    def adapted_products(self) -> Sequence[AdaptedLinear]:
        return self._qkv, self._output

    def __call__(self, x: Tensor, step: LayerInputs, kv: PagedKV) -> Tensor:
        """x [num_tokens, hidden] to the same shape. Stores the tokens' keys and values."""
        qkv = self._qkv(x, step.adapter_slots).view(len(x), -1, self._head_dim)
        turn = step.rotations[self._rotation]
        q = self._ops.rope_and_store_kv(
            qkv, turn.cosines, turn.sines, step.slots, kv, self._norms, step.positions, self._centre
        )
        if self._query_norm is not None:
            q = self._query_norm(q.flatten(0, 1)).view(q.shape)
        attended = self._ops.paged_attention(q, kv, step.attention[self._window], self._scoring)
        return self._sum(self._output(attended.flatten(1), step.adapter_slots))


def _key_centre(bias: Tensor, config: ModelConfig, rope: RopeConfig) -> Tensor:
    """What the biases of keys add on average over CENTRED_POSITIONS: [num_kv_heads, head_dim] float32.

    bias  of queries, keys and values

    A bias that turns slowly is nearly the same number in all keys. In Qwen2.5 some are a hundred times as large as what
    differs between keys.
    """
    keys = bias[config.query_size : config.query_size + config.kv_size].float()
    first, second = keys.view(config.num_kv_heads, -1).chunk(2, dim=-1)
    cosines, sines = Rope(rope, config.head_dim, bias.device).mean(CENTRED_POSITIONS)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def _query_key_value(name: str, config: ModelConfig, order: Tensor | None, scale: float) -> list[Rows]:
    """The rows of the product, in the order that the kernels rotate, and queries multiplied by `scale`."""
    names = config.names
    query = Rows(f"{name}.{names.query}", config.query_size, _of_heads(order, config.num_heads), scale)
    key = Rows(f"{name}.{names.key}", config.kv_size, _of_heads(order, config.num_kv_heads))
    if not names.qkv:
        return [query, key, Rows(f"{name}.{names.value}", config.kv_size)]
    size = config.query_size + 2 * config.kv_size
    whole = torch.arange(size)
    if query.order is not None and key.order is not None:
        whole[: len(query.order)] = query.order
        whole[len(query.order) : -config.kv_size] = key.order + len(query.order)
    factor = torch.ones(size)
    factor[: config.query_size] = scale
    if config.has_qkv_by_head:
        whole = torch.arange(size).view(config.num_heads, 3, config.head_dim).transpose(0, 1).flatten()[whole]
    is_same = order is None and scale == 1 and not config.has_qkv_by_head
    rows = Rows(f"{name}.{names.qkv}", size, is_transposed=config.is_transposed)
    return [rows if is_same else replace(rows, order=whole, factor=factor)]


def _of_rank(rows: list[Rows], query: Cut, kv: Cut) -> list[Rows]:
    """The rows of some heads: `query` and `kv` are parts of the rows of queries, and of those of keys or values."""
    if len(rows) == 3:
        return [each.taking(cut.index()) for each, cut in zip(rows, (query, kv, kv), strict=True)]
    index = torch.cat((query.index(), kv.index(query.whole), kv.index(query.whole + kv.whole)))
    return [rows[0].taking(index)]


def _head_norms(weights: Weights, name: str, config: ModelConfig, order: Tensor | None, scale: float) -> HeadNorms:
    is_each = config.head_norms == "each"
    query, key = (
        weights.norm(
            Rows(f"{name}.{kind}", heads * config.head_dim, _of_heads(order, heads), factor, config.norm_offset)
        )
        for kind, heads, factor in (
            (config.names.query_norm, 1 if is_each else config.num_heads, scale),
            (config.names.key_norm, 1 if is_each else config.num_kv_heads, 1.0),
        )
    )
    return HeadNorms(query, key, config.norm_eps)


def _head_norms_behind(weights: Weights, name: str, config: ModelConfig, scale: float) -> tuple[HeadNorms, Norm]:
    """Norms of rotated heads: a rotation leaves a head's length as it is, so that of keys can come before it.

    Scores are sums of products of queries and keys in each dimension: the weights of the keys' norm are the queries'.
    """
    query, key = (
        weights.norm(Rows(f"{name}.{kind}", config.head_dim, factor=factor))
        for kind, factor in ((config.names.query_norm, scale), (config.names.key_norm, 1.0))
    )
    query *= key
    return HeadNorms(None, key.fill_(1.0), config.norm_eps), Norm(weights.ops, query, config.norm_eps)


def _of_heads(order: Tensor | None, num_heads: int) -> Tensor | None:
    """An order of the dimensions of one head, for so many."""
    return None if order is None else (torch.arange(num_heads)[:, None] * len(order) + order).flatten()


class Layer:
    """Attention and feed-forward layer: reads the stream, adds to it, and stores keys and values in its own pages."""

    def __init__(self, weights: Weights, number: int, config: ModelConfig, rotation: int) -> None:
        name = f"{config.names.layers}.{number}"
        window, rope = config.windows[number], config.rotations[number]
        self._attention = Attention(weights, f"{name}.{config.names.attention}", config, window, rope, rotation)
        experts = config.experts
        self._mlp: MLP | ExpertMLP
        if experts is not None and experts.is_expert[number]:
            self._mlp = ExpertMLP(weights, name, config, experts)
        else:
            self._mlp = MLP(weights, f"{name}.{config.names.mlp}".rstrip("."), config)
        self._is_parallel = config.is_parallel
        self._before_attention, self._behind_attention, self._before_mlp, self._behind_mlp = (
            _norm(weights, f"{name}.{norm}", config, factor) if norm else None
            for norm, factor in (
                (config.norms.attention_before, 1.0),
                (config.norms.attention_behind, config.residual_scale),
                (config.norms.mlp_before, 1.0),
                (config.norms.mlp_behind, config.residual_scale),
            )
        )

    @property
    def adapted_products(self) -> Sequence[AdaptedLinear]:
        return *self._attention.adapted_products, *self._mlp.adapted_products

    def __call__(self, stream: ResidualStream, step: LayerInputs, kv: PagedKV) -> None:
        x = stream.read(self._before_attention)
        if self._is_parallel:  # both sublayers read the same stream, and perhaps the same norm
            of_mlp = x if self._before_mlp is None else stream.read(self._before_mlp)
            stream.add(self._attention(x, step, kv))
            stream.add(self._mlp(of_mlp, step.adapter_slots))
            return
        stream.add(self._attention(x, step, kv), self._behind_attention)
        stream.add(self._mlp(stream.read(self._before_mlp), step.adapter_slots), self._behind_mlp)


def _norm(weights: Weights, name: str, config: ModelConfig, factor: float = 1.0) -> Norm:
    rows = Rows(name, config.hidden_size, factor=factor, offset=config.norm_offset)
    weight = weights.norm(rows) if config.has_norm_weights else weights.ones(config.hidden_size)
    bias = weights.norm_bias(rows) if config.norm_bias else None
    return Norm(weights.ops, weight, config.norm_eps, bias, config.subtracts_mean)


class Decoder:
    """Embedding, layers, final norm and head."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        ops, hidden = weights.ops, config.hidden_size
        self.config = config
        self._ops, self._dtype, self._share = ops, weights.dtype, weights.share
        self._vocabulary = weights.share.of(config.vocab_size, "tokens")
        # Logits are scaled by the head. Where that is the embedding too, an embedding makes up for it.
        is_tied, scale = config.tie_word_embeddings, config.logit_scale
        embedding = Rows(config.names.embedding, config.vocab_size, factor=scale if is_tied else 1.0)
        head = Rows(config.names.head, config.vocab_size, factor=scale)
        if not weights.share.is_whole:
            embedding, head = (rows.taking(self._vocabulary.index()) for rows in (embedding, head))
        table = weights.table(embedding, hidden, is_tied)
        self._embedding_scale = config.embedding_scale / (scale if is_tied else 1.0)
        self._head = weights.head(head, hidden, config.head_bias, tied_to=(embedding, table) if is_tied else None)
        self._embedding = ops.embedding(table, self._head if is_tied else None, weights.dtype)
        kinds = list(dict.fromkeys(config.rotations))
        self._ropes = [Rope(kind, config.head_dim, weights.device) for kind in kinds]
        self._positions = self._position_table(weights) if config.names.positions else None
        del table  # where the backend has packed the table, there is no need for both
        self._layers = [
            Layer(weights, number, config, kinds.index(kind)) for number, kind in enumerate(config.rotations)
        ]
        self._final_norm = _norm(weights, config.names.final_norm, config)
        self.weight_bytes = weights.num_bytes

    @property
    def adapted_products(self) -> Sequence[AdaptedLinear]:
        """The products that adapters can change: those of attention and of dense feed-forward layers."""
        return [product for layer in self._layers for product in layer.adapted_products]

    def _position_table(self, weights: Weights) -> Tensor:
        config = self.config
        size = config.max_position_embeddings + config.first_position
        return weights.whole(Rows(config.names.positions, size), config.hidden_size)[config.first_position :]

    def tabulate_rotations(self, num_positions: int) -> None:
        """Compute the cosines and sines of all positions, which steps look up. Else each step computes its own."""
        for rope in self._ropes:
            rope.tabulate(num_positions)

    def forward(self, inputs: StepInputs, cache: Sequence[PagedKV]) -> Tensor:
        """Logits [num_logits, vocab], in the weights' dtype or float32. Fills `cache`, the pages of each layer."""
        return self.logits(self.embed(inputs), inputs, cache)

    def embed(self, inputs: StepInputs) -> Embedded:
        """The part of `forward` that is never recorded, so it may call torch."""
        tokens = self._embedded(inputs.token_ids)
        if self._embedding_scale != 1:
            tokens = tokens * self._embedding_scale
        if self._positions is not None:
            tokens = tokens + self._positions[inputs.positions]
        if not self.config.norms.attention_before:  # products read the stream as it is
            tokens = tokens.to(self._dtype)
        return Embedded(tokens, tuple(Rotation(*rope.rotations(inputs.positions)) for rope in self._ropes))

    def _embedded(self, ids: Tensor) -> Tensor:
        """Rows of the embedding. Each is one rank's, and the others add zeros, so the sum has its bits."""
        if self._share.is_whole:
            return self._embedding(ids)
        places = ids - self._vocabulary.start
        is_elsewhere = (places < 0) | (places >= self._vocabulary.size)
        rows = self._embedding(places.masked_fill_(is_elsewhere, 0))
        return self._share.sum(rows.masked_fill_(is_elsewhere[:, None], 0))

    def logits(self, embedded: Embedded, inputs: StepInputs, cache: Sequence[PagedKV]) -> Tensor:
        """The rest of `forward`. Calls ops of the backend only, if all rows are wanted. Changes `embedded.tokens`."""
        return self.head(self.hidden_states(embedded, inputs, cache), inputs.logit_rows)

    def hidden_states(self, embedded: Embedded, inputs: StepInputs, cache: Sequence[PagedKV]) -> Tensor:
        """[num_tokens, hidden], after the last norm. Fills `cache`, and changes `embedded.tokens`."""
        stream = ResidualStream(embedded.tokens, self._ops)
        positions = inputs.positions if self._ropes[0].has_tables else None
        steps = [
            LayerInputs(embedded.rotations, positions, each.slots, each.attention, inputs.adapter_slots)
            for each in inputs.groups
        ]
        for layer, group, kv in zip(self._layers, inputs.group_of, cache, strict=True):
            layer(stream, steps[group], kv)
        return stream.read(self._final_norm)

    def head(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits after these rows of the hidden states, or after all; on ranks other than 0 a part of them."""
        logits = self._head(hidden if rows is None else hidden.index_select(0, rows))
        if self.config.logit_cap:
            self._ops.cap(logits, self.config.logit_cap)
        return self._share.gather(logits, self.config.vocab_size)
