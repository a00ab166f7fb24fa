"""The host arrays of a step, allocated once. A sequence's row of the block table is only extended, not rewritten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ....kernels import Backend, PagedKV
from ...core.step import Chunk
from ...models import StepInputs


@dataclass(slots=True)
class _Row:
    """A row of the block table. `blocks` is a sequence's own list, which only grows until it is replaced."""

    number: int
    blocks: list[int]
    num_written: int = 0
    last_step: int = 0


class StepArrays:
    """Room for `token_budget` tokens, in as many chunks, of sequences with at most `max_model_len` tokens."""

    def __init__(self, token_budget: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = np.zeros(token_budget, dtype=np.int64)
        self._offsets = np.arange(token_budget)
        self._context_len = np.zeros(token_budget, dtype=np.int32)
        self._query_start = np.zeros(token_budget + 1, dtype=np.int32)
        self._block_table = np.zeros((token_budget, -(-max_model_len // block_size)), dtype=np.int32)
        self._rows: dict[int, _Row] = {}  # by the identity of the list, which is kept alive here
        self._free_rows = list(range(token_budget))
        self._step = 0

    def pack(self, chunks: list[Chunk], ops: Backend, kv: PagedKV, windows: Iterable[int | None]) -> StepInputs:
        """The model's inputs for these chunks, on the device of the pages `kv`. Valid until the next call.

        windows  the sliding windows of the layers
        """
        self._step += 1
        token_ids: list[int] = []
        for chunk in chunks:
            token_ids += chunk.tokens
        num_tokens = len(token_ids)
        self._token_ids[:num_tokens] = token_ids

        lengths = np.array([chunk.length for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        samples = np.array([chunk.samples for chunk in chunks])
        ends = np.cumsum(lengths)  # among the step's tokens
        positions = np.repeat(starts + lengths - ends, lengths) + self._offsets[:num_tokens]

        rows = np.array([self._row(chunk) for chunk in chunks])
        blocks = self._block_table[np.repeat(rows, lengths), positions // self._block_size].astype(np.int64)
        logit_rows = ends[samples] - 1
        parts, part_lengths, part_contexts = attended_parts(lengths, starts + lengths, samples)
        query_start, context_len = self._query_start[: len(parts) + 1], self._context_len[: len(parts)]
        np.cumsum(part_lengths, out=query_start[1:])
        context_len[:] = part_contexts
        num_blocks = -(-int(context_len.max()) // self._block_size)
        table = self._block_table[rows[parts], :num_blocks]
        return StepInputs(
            token_ids=torch.from_numpy(self._token_ids[:num_tokens]).to(kv.device),
            positions=torch.from_numpy(positions).to(kv.device),
            slots=torch.from_numpy(blocks * self._block_size + positions % self._block_size).to(kv.device),
            logit_rows=torch.from_numpy(logit_rows).to(kv.device),
            attention={
                window: ops.plan_attention(query_start, context_len, table, kv, window, ops.is_deterministic)
                for window in set(windows)
            },
        )

    def _row(self, chunk: Chunk) -> int:
        """The number of the sequence's row in the block table, once its new blocks are written there."""
        blocks = chunk.seq.blocks
        row = self._rows.get(id(blocks))
        if row is None:
            if not self._free_rows:
                self._forget()
            row = self._rows[id(blocks)] = _Row(self._free_rows.pop(), blocks)
        row.last_step = self._step
        if row.num_written < len(blocks):
            self._block_table[row.number, row.num_written : len(blocks)] = blocks[row.num_written :]
            row.num_written = len(blocks)
        return row.number

    def _forget(self) -> None:
        """Frees the rows of sequences that are not in this step. Most of them have ended."""
        for key, row in list(self._rows.items()):
            if row.last_step != self._step:
                self._free_rows.append(row.number)
                del self._rows[key]


def attended_parts(
    lengths: np.ndarray, contexts: np.ndarray, samples: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The parts of the chunks that are attended separately. A sampling chunk's last token is a part of its own.

    A sequence that shares the prompt computes that token again, as a decode, and must get the same logits bit by bit.

    lengths, contexts, samples  [chunks] int, int, bool; a context includes its chunk
    return                      chunk, length and context of each part, [parts] int
    """
    is_cut = samples & (lengths > 1)
    if not is_cut.any():
        return np.arange(len(lengths)), lengths, contexts
    chunks = np.repeat(np.arange(len(lengths)), 1 + is_cut)
    part_lengths, part_contexts = lengths[chunks], contexts[chunks]
    last = (np.cumsum(1 + is_cut) - 1)[is_cut]
    part_lengths[last] = 1
    part_lengths[last - 1] -= 1
    part_contexts[last - 1] -= 1
    return chunks, part_lengths, part_contexts
