"""Values that the attention ops share: the pages of a KV cache and the shape of one step's attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's keys and values, each [num_blocks, block_size, num_kv_heads, head_dim].

    Token t of a sequence lives in slot `block_table[t // block_size] * block_size + t % block_size`. Pages of float8
    hold what was divided by `key_scales` and `value_scales`, each [num_blocks, block_size, num_kv_heads] float32.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        return self.keys.device


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each and contexts of about one length, attended together.

    rows          [group] int64, their rows among the packed queries
    slots         [group * padded_len] int64; what lies beyond a context repeats its first slot
    mask          [group, 1, 1, padded_len], 0 or -inf, in the dtype of the cache; None if no context is padded
    keys, values  [group, padded_len, num_kv_heads, head_dim], room to gather them into
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor | None
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several adjacent queries of one sequence.

    rows          theirs among the packed queries
    slots         [padded_len] int64, of the context; what lies beyond it repeats its first slot
    mask          [queries, padded_len], 0 or -inf, in the dtype of the cache
    keys, values  [padded_len, num_kv_heads, head_dim], room to gather them into
    """

    rows: slice
    slots: Tensor
    mask: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which queries see which slots: made once a step, used by every layer.

    query_start     [num_seqs + 1] int32: sequence i has rows query_start[i] to query_start[i + 1] of the packed queries
    context_len     [num_seqs] int32, tokens in the cache once this step's are stored; the queries are the last of them
    block_table     [num_seqs, max_blocks] int32; entries beyond a sequence's blocks are never used
    sliding_window  a query sees this many tokens at most, its own included; None: all
    rows            [num_seqs] int32, the rows of `block_table`, which may then have others, that the sequences have;
                    None: sequence i has row i. A sequence of context 0 is padding: row -1, its query is not to be used
    num_decodes     this many sequences, the first ones, have one query each
    max_query_len   queries of the sequence that has most
    decodes         filled by a backend that gathers pages before it attends, like `prefills`
    """

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    sliding_window: int | None
    rows: Tensor | None = None
    num_decodes: int = 0
    max_query_len: int = 0
    decodes: tuple[DecodeGroup, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
