"""A step plan as packed arrays: host memory that lives as long as the runner and is filled anew for each step."""

from __future__ import annotations

from collections.abc import Sequence as Chunks
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.models import StepInputs
from engine.sequence import Chunk
from kernels import Backend, PagedKV


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Views of the arrays, valid until the next step is packed.

    token_ids, positions, slots  [num_tokens] int64
    logit_rows                   [num_sampling] int64
    query_start                  [num_seqs + 1] int32
    context_len                  [num_seqs] int32
    block_table                  [num_seqs, max_blocks of these sequences] int32
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    logit_rows: np.ndarray
    query_start: np.ndarray
    context_len: np.ndarray
    block_table: np.ndarray

    def to_inputs(self, ops: Backend, kv: PagedKV, sliding_window: int | None) -> StepInputs:
        """On the device of `kv`, any layer's pages."""

        def on_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(kv.device)

        return StepInputs(
            token_ids=on_device(self.token_ids),
            positions=on_device(self.positions),
            slots=on_device(self.slots),
            logit_rows=on_device(self.logit_rows),
            attention=ops.plan_attention(self.query_start, self.context_len, self.block_table, kv, sliding_window),
        )


class StepArrays:
    """Room for any step within the token budget and the sequence limit."""

    def __init__(self, token_budget: int, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = np.empty(token_budget, dtype=np.int64)
        self._positions = np.empty(token_budget, dtype=np.int64)
        self._slots = np.empty(token_budget, dtype=np.int64)
        self._query_start = np.zeros(max_num_seqs + 1, dtype=np.int32)
        self._context_len = np.empty(max_num_seqs, dtype=np.int32)
        self._block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)

    def pack(self, chunks: Chunks[Chunk]) -> PackedStep:
        start = 0
        logit_rows = []
        most_blocks = 0
        for seq, chunk in enumerate(chunks):
            end = start + chunk.length
            blocks = chunk.seq.blocks[: -(-chunk.end // self._block_size)]
            most_blocks = max(most_blocks, len(blocks))
            self._block_table[seq, : len(blocks)] = blocks
            self._token_ids[start:end] = chunk.seq.tokens[chunk.start : chunk.end]
            self._fill_places(slice(start, end), chunk, self._block_table[seq])
            self._context_len[seq] = chunk.end
            self._query_start[seq + 1] = end
            if chunk.samples:
                logit_rows.append(end - 1)
            start = end
        return PackedStep(
            token_ids=self._token_ids[:start],
            positions=self._positions[:start],
            slots=self._slots[:start],
            logit_rows=np.array(logit_rows, dtype=np.int64),
            query_start=self._query_start[: len(chunks) + 1],
            context_len=self._context_len[: len(chunks)],
            block_table=self._block_table[: len(chunks), :most_blocks],
        )

    def _fill_places(self, rows: slice, chunk: Chunk, block_table: np.ndarray) -> None:
        size = self._block_size
        if chunk.length == 1:
            self._positions[rows] = chunk.start
            self._slots[rows] = block_table[chunk.start // size] * size + chunk.start % size
        else:
            positions = self._positions[rows] = np.arange(chunk.start, chunk.end)
            self._slots[rows] = block_table[positions // size].astype(np.int64) * size + positions % size
