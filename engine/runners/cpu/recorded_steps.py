"""Decode steps on a CPU, recorded once for each number of rows, and then replayed in one call."""

from __future__ import annotations

from collections.abc import Sequence as Layers
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....kernels import Backend, PagedKV, Recorder, Recording
from ...core.layer_groups import LayerGroups
from ...core.sequence import BlockTable
from ...core.step import Chunk
from ...models import Decoder, Embedded, GroupInputs, StepInputs


class DecodeArrays:
    """The inputs of a step with up to `most` chunks of one token, at addresses that never change.

    A row of the block tables is only extended while the same sequence has it.

    windows  the sliding windows of the layers
    """

    def __init__(
        self, most: int, max_model_len: int, block_size: int, groups: LayerGroups, windows: Layers[int | None]
    ) -> None:
        self._block_size, self._group_of, self._windows = block_size, groups.group_of, groups.attended(windows)
        num_groups = len(self._windows)
        self._token_ids = np.zeros(most, dtype=np.int64)
        self._positions = np.zeros(most, dtype=np.int64)
        self._slots = np.zeros((num_groups, most), dtype=np.int64)
        self._query_start = np.arange(most + 1, dtype=np.int32)
        self._context_len = np.zeros(most, dtype=np.int32)
        self._adapter_slots = np.zeros(most, dtype=np.int32)
        self._block_tables = np.zeros((num_groups, most, -(-max_model_len // block_size)), dtype=np.int32)
        # Of each row: the sequence's own list, which only grows until it is replaced.
        self._blocks: list[BlockTable] = [BlockTable()] * most
        self._num_written = [[0] * most for _ in range(num_groups)]

    def inputs(self, count: int, ops: Backend, kv: PagedKV, has_adapters: bool = False) -> StepInputs:
        """Views of the first `count` rows, with logits after each.

        has_adapters  rows may have adapters
        """
        query_start, context_len = self._query_start[: count + 1], self._context_len[:count]
        groups = []
        for slots, block_table, windows in zip(self._slots, self._block_tables, self._windows, strict=True):
            table = block_table[:count]
            plans = {
                window: ops.plan_attention(query_start, context_len, table, kv, window, ops.is_deterministic)
                for window in windows
            }
            groups.append(GroupInputs(torch.from_numpy(slots[:count]), plans))
        return StepInputs(
            token_ids=torch.from_numpy(self._token_ids[:count]),
            positions=torch.from_numpy(self._positions[:count]),
            logit_rows=None,
            groups=groups,
            group_of=self._group_of,
            adapter_slots=torch.from_numpy(self._adapter_slots[:count]) if has_adapters else None,
        )

    def fill(self, chunks: list[Chunk]) -> bool:
        """Writes these chunks, of one token each, to the first rows; returns whether one of them has an adapter."""
        size, count = self._block_size, len(chunks)
        tokens, starts = [], []
        slots: list[list[int]] = [[] for _ in self._windows]
        for row, chunk in enumerate(chunks):
            seq, start = chunk.seq, chunk.start
            blocks = seq.blocks
            tokens.append(chunk.drafts[0] if chunk.drafts else seq.tokens[start])
            starts.append(start)
            is_new = self._blocks[row] is not blocks
            if is_new:
                self._blocks[row] = blocks
            for group, table in enumerate((blocks, *blocks.windows)):
                slots[group].append(table[start // size] * size + start % size)
                written = 0 if is_new else self._num_written[group][row]
                if written < len(table):
                    self._block_tables[group, row, written : len(table)] = table[written:]
                    self._num_written[group][row] = len(table)
        self._token_ids[:count] = tokens
        self._positions[:count] = starts
        self._slots[:, :count] = slots
        np.add(self._positions[:count], 1, out=self._context_len[:count], casting="same_kind")
        has_adapters = any(chunk.seq.adapter_slot >= 0 for chunk in chunks)
        if has_adapters:
            self._adapter_slots[:count] = [chunk.seq.adapter_slot for chunk in chunks]
        return has_adapters


@dataclass(slots=True)
class _Step:
    inputs: StepInputs
    embedded: Embedded
    recording: Recording | None = None


class RecordedSteps:
    """The decode steps of a model. A step is recorded the first time that it has a certain number of rows, and once
    more the first time that one of so many rows has an adapter.

    cache      pages of each layer, of which `Backend.can_record` holds
    most       rows of a step
    num_taken  recordings so far: a step takes longer when it is recorded
    """

    def __init__(
        self,
        model: Decoder,
        ops: Backend,
        cache: Layers[PagedKV],
        most: int,
        max_model_len: int,
        block_size: int,
        groups: LayerGroups,
    ) -> None:
        self._model, self._ops, self._cache, self._most = model, ops, cache, most
        self._arrays = DecodeArrays(most, max_model_len, block_size, groups, model.config.windows)
        self._embedded = model.embed(self._inputs(most))  # room for any step's
        self._recorder = Recorder()
        self._steps: dict[tuple[int, bool], _Step] = {}  # by number of rows, and whether one has an adapter
        self.num_taken = 0

    def has_room_for(self, chunks: list[Chunk]) -> bool:
        """Whether every chunk computes one token and samples, and there are not too many."""
        return len(chunks) <= self._most and all(chunk.length == 1 and chunk.samples for chunk in chunks)

    def logits(self, chunks: list[Chunk]) -> Tensor:
        """The logits of `Decoder.forward` for these chunks, to the last bit. Valid until the next call."""
        count = len(chunks)
        has_adapters = self._arrays.fill(chunks)
        step = self._steps.get((count, has_adapters))
        if step is None:
            step = _Step(self._inputs(count, has_adapters), self._embedded.first(count))
            self._steps[count, has_adapters] = step
        step.embedded.copy_(self._model.embed(step.inputs))
        if step.recording is None or not step.recording.replay():
            self.num_taken += 1
            step.recording = self._recorder.record(partial(self._model.logits, step.embedded, step.inputs, self._cache))
        return step.recording.result

    def _inputs(self, count: int, has_adapters: bool = False) -> StepInputs:
        return self._arrays.inputs(count, self._ops, self._cache[0], has_adapters)
