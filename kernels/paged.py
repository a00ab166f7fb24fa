"""The inputs of attention ops: the pages of a KV cache, and the plan of one step's attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The dtypes whose pages have scales, with the number that the greatest value of a head becomes.
GREATEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's keys and values, each [num_blocks, block_size, num_kv_heads, head_dim].

    Token t of a sequence is in slot `block_table[t // block_size] * block_size + t % block_size`. Pages of a dtype in
    GREATEST hold values divided by `key_scales` and `value_scales`, which are [num_blocks, block_size, num_kv_heads]
    float32. Keys and queries have other dimensions then: `rope_and_store_kv` mixes them.
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


def is_int8(kv: PagedKV) -> bool:
    """Whether compiled code supports these pages with their scales."""
    parts = (kv.keys, kv.values, kv.key_scales, kv.value_scales)
    return kv.dtype == torch.int8 and all(part is not None and part.is_contiguous() for part in parts)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer's scores, scaled by 1 / sqrt(head_dim), become weights, beside the softmax over them.

    softcap  scores become softcap * tanh(score / softcap) (Gemma Team, 2024); 0: they stay
    sinks    [num_heads] float32, a score of each query head that is in the softmax's denominator alone, where no cap
             applies (OpenAI, 2025); None: there are none
    """

    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.softcap == 0 and self.sinks is None


PLAIN_SCORING = Scoring()


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each and contexts of similar length, which are attended together.

    rows          [group] int64, their rows among the packed queries
    slots         [group * padded_len] int64; padding repeats a context's first slot
    mask          [group, 1, 1, padded_len], 0 or -inf, in the dtype of keys and values; None if no context is padded
    keys, values  [group, padded_len, num_kv_heads, head_dim], buffers to gather pages into: in the dtype of the cache,
                  or in float32 if it has scales
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor | None
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several adjacent queries of one sequence.

    rows          their rows among the packed queries
    slots         [padded_len] int64 of the context; padding repeats its first slot
    mask          [queries, padded_len], 0 or -inf, in the dtype of keys and values
    keys, values  [padded_len, num_kv_heads, head_dim], buffers likewise
    """

    rows: slice
    slots: Tensor
    mask: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which queries see which slots. Made once a step and used by every layer.

    query_start     [num_seqs + 1] int32: sequence i has rows query_start[i] to query_start[i + 1] of the packed queries
    context_len     [num_seqs] int32, tokens in the cache once this step's are stored; the queries are the last of them
    block_table     [num_seqs, max_blocks] int32; entries beyond a sequence's blocks, and those before the windows of
                    its queries, may be of any block: they are not read
    sliding_window  the most tokens that a query sees, its own included; None: all
    one_order       a query's sums have the same order in every plan that contains it
    rows            [num_seqs] int32, each sequence's row of `block_table`, which may have more rows; None: sequence i
                    has row i. A sequence with context 0 is padding: its row is -1, and its query is ignored
    num_decodes     the first `num_decodes` sequences have one query each
    arrivals        [num_decodes * num_heads or more] int32 zeros for kernels that count with it and leave zeros behind;
                    two streams must not share it. None: such kernels allocate it each time
    decodes         filled, like `prefills`, by a backend that gathers pages before it attends
    """

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    sliding_window: int | None
    one_order: bool = False
    rows: Tensor | None = None
    num_decodes: int = 0
    arrivals: Tensor | None = None
    decodes: tuple[DecodeGroup, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
