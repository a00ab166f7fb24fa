"""Host arrays of one step, allocated once and filled anew for each plan."""

from __future__ import annotations

import numpy as np
import torch

from engine.models import StepInputs
from engine.sequence import Chunk
from kernels import Backend, PagedKV


class StepArrays:
    """Room for `token_budget` tokens of `max_num_seqs` sequences, each `max_model_len` tokens long at most."""

    def __init__(self, token_budget: int, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = np.zeros(token_budget, dtype=np.int64)
        self._positions = np.zeros(token_budget, dtype=np.int64)
        self._context_len = np.zeros(max_num_seqs, dtype=np.int32)
        self._query_start = np.zeros(max_num_seqs + 1, dtype=np.int32)
        self._block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)

    def pack(self, chunks: list[Chunk], ops: Backend, kv: PagedKV, sliding_window: int | None) -> StepInputs:
        """What the model computes for these chunks, on the device of the pages `kv`. Valid until the next call."""
        num_tokens = self._fill(chunks)
        num_seqs = len(chunks)
        query_start, context_len = self._query_start[: num_seqs + 1], self._context_len[:num_seqs]
        num_blocks = -(-int(context_len.max()) // self._block_size)
        block_table = self._block_table[:num_seqs, :num_blocks]
        positions = self._positions[:num_tokens]
        seq_of_token = np.repeat(np.arange(num_seqs), np.diff(query_start))
        blocks = block_table[seq_of_token, positions // self._block_size].astype(np.int64)
        logit_rows = [int(query_start[at + 1]) - 1 for at, chunk in enumerate(chunks) if chunk.samples]
        return StepInputs(
            token_ids=torch.from_numpy(self._token_ids[:num_tokens]).to(kv.device),
            positions=torch.from_numpy(positions).to(kv.device),
            slots=torch.from_numpy(blocks * self._block_size + positions % self._block_size).to(kv.device),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=kv.device),
            attention=ops.plan_attention(query_start, context_len, block_table, kv, sliding_window),
        )

    def _fill(self, chunks: list[Chunk]) -> int:
        """Returns the number of tokens."""
        row = 0
        for at, chunk in enumerate(chunks):
            rows = slice(row, row + chunk.length)
            self._token_ids[rows] = chunk.seq.tokens[chunk.start : chunk.end]
            self._positions[rows] = np.arange(chunk.start, chunk.end)
            self._query_start[at + 1] = row = rows.stop
            self._context_len[at] = chunk.end
            num_blocks = -(-chunk.end // self._block_size)
            self._block_table[at, :num_blocks] = chunk.seq.blocks[:num_blocks]
        return row
