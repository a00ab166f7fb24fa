"""The host arrays of a step, allocated once. A sequence's row of the block table is only extended, not rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....kernels import Backend, PagedKV
from ...core.layer_groups import LayerGroups
from ...core.sequence import BlockTable
from ...core.step import Chunk
from ...models import GroupInputs, StepInputs


@dataclass(slots=True)
class _Row:
    """A row of the block tables. `blocks` is a sequence's own list, which only grows until it is replaced.

    num_written  of each group's table
    """

    number: int
    blocks: BlockTable
    num_written: list[int]
    last_step: int = 0


class StepArrays:
    """Room for `token_budget` tokens, in as many chunks, of sequences with at most `max_model_len` tokens.

    windows  the sliding windows of the layers
    """

    def __init__(
        self,
        token_budget: int,
        max_model_len: int,
        block_size: int,
        groups: LayerGroups,
        windows: Sequence[int | None],
    ) -> None:
        self._block_size, self._group_of, self._windows = block_size, groups.group_of, groups.attended(windows)
        self._token_ids = np.zeros(token_budget, dtype=np.int64)
        self._offsets = np.arange(token_budget)
        self._context_len = np.zeros(token_budget, dtype=np.int32)
        self._query_start = np.zeros(token_budget + 1, dtype=np.int32)
        shape = (len(self._windows), token_budget, -(-max_model_len // block_size))
        self._block_tables = np.zeros(shape, dtype=np.int32)
        self._rows: dict[int, _Row] = {}  # by the identity of the list, which is kept alive here
        self._free_rows = list(range(token_budget))
        self._step = 0

    @property
    def windows(self) -> Sequence[set[int | None]]:
        """The sliding windows of each group of layers."""
        return self._windows

    @property
    def group_of(self) -> Sequence[int]:
        """Each layer's group."""
        return self._group_of

    def pack(self, chunks: list[Chunk], ops: Backend, kv: PagedKV) -> StepInputs:
        """The model's inputs for these chunks, on the device of the pages `kv`. Valid until the next call."""
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
        token_rows, columns, within = (
            np.repeat(rows, lengths),
            positions // self._block_size,
            positions % self._block_size,
        )
        logit_rows = ends[samples] - 1
        parts, part_lengths, part_contexts = attended_parts(lengths, starts + lengths, samples)
        query_start, context_len = self._query_start[: len(parts) + 1], self._context_len[: len(parts)]
        np.cumsum(part_lengths, out=query_start[1:])
        context_len[:] = part_contexts
        num_blocks = -(-int(context_len.max()) // self._block_size)
        groups = []
        for block_table, windows in zip(self._block_tables, self._windows, strict=True):
            slots = block_table[token_rows, columns].astype(np.int64) * self._block_size + within
            table = block_table[rows[parts], :num_blocks]
            plans = {
                window: ops.plan_attention(query_start, context_len, table, kv, window, ops.is_deterministic)
                for window in windows
            }
            groups.append(GroupInputs(torch.from_numpy(slots).to(kv.device), plans))
        return StepInputs(
            token_ids=torch.from_numpy(self._token_ids[:num_tokens]).to(kv.device),
            positions=torch.from_numpy(positions).to(kv.device),
            logit_rows=torch.from_numpy(logit_rows).to(kv.device),
            groups=groups,
            group_of=self._group_of,
            adapter_slots=adapter_slots_of(chunks, kv.device),
        )

    def _row(self, chunk: Chunk) -> int:
        """The number of the sequence's row in the block tables, once its new blocks are written there."""
        blocks = chunk.seq.blocks
        row = self._rows.get(id(blocks))
        if row is None:
            if not self._free_rows:
                self._forget()
            row = self._rows[id(blocks)] = _Row(self._free_rows.pop(), blocks, [0] * len(self._windows))
        row.last_step = self._step
        for group, table in enumerate((blocks, *blocks.windows)):
            if (written := row.num_written[group]) < len(table):
                self._block_tables[group, row.number, written : len(table)] = table[written:]
                row.num_written[group] = len(table)
        return row.number

    def _forget(self) -> None:
        """Frees the rows of sequences that are not in this step. Most of them have ended."""
        for key, row in list(self._rows.items()):
            if row.last_step != self._step:
                self._free_rows.append(row.number)
                del self._rows[key]


def adapter_slots_of(chunks: list[Chunk], device: torch.device) -> torch.Tensor | None:
    """[num_tokens] int32, the slot of each token's adapter, or -1; None if no chunk has one."""
    slots = np.array([chunk.seq.adapter_slot for chunk in chunks], dtype=np.int32)
    if (slots < 0).all():
        return None
    return torch.from_numpy(np.repeat(slots, [chunk.length for chunk in chunks])).to(device)


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
