"""A step's inputs on the device: decodes first, then chunks of prompts, all sent in one copy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ....kernels import AttentionPlan, Verified
from ...core.layer_groups import LayerGroups
from ...core.step import Chunk
from ...models import GroupInputs, ModelConfig, StepInputs
from .graphs import StepShape
from .rows import DeviceRows
from .staging import Staging

# What padding holds: a token that is stored nowhere, of a sequence without a context or a row.
_NO_TOKEN = {"tokens": 0, "positions": 0}
_NO_SLOT = -1
_NO_SEQUENCE = {"rows": -1, "sampled_rows": -1, "context_len": 0, "ranks": 0}


class PackedInputs:
    """The inputs of steps of up to `num_tokens` tokens in `num_seqs` entries, at addresses that never change.

    An entry is a sequence's decode, one of its drafts, or its chunk. A draft is a decode of its sequence, one position
    further than the entry before it. Decodes without drafts come first, then those with drafts, then chunks.

    A step in a shape larger than itself is padded: after its decodes with decodes, and after its chunks with chunks
    that have no tokens, except the last, which has all padded tokens.

    tokens, positions         of each token; token -1: the host does not know it yet, it is the last one of its row
    slots                     of each token, one group of layers behind the other
    adapter_slots             of each token: the slot of its adapter, or -1; steps without adapters do not read them
    query_start               where each entry's tokens start
    context_len               of each entry: tokens of the sequence up to its last one
    rows, sampled_rows        of each entry: its sequence's row; sampled_rows is -1 where no token is chosen
    ranks                     of each entry: as in Verified
    logit_rows                each entry's last token
    one_order                 of the attention's plan
    """

    def __init__(
        self,
        num_tokens: int,
        num_seqs: int,
        rows: DeviceRows,
        block_size: int,
        model: ModelConfig,
        device: torch.device,
        groups: LayerGroups,
        one_order: bool = False,
    ) -> None:
        self._rows, self._block_size, self._num_tokens = rows, block_size, num_tokens
        self._group_of, self._windows = groups.group_of, groups.attended(model.windows)
        self._one_order = one_order
        of_tokens = dict.fromkeys(_NO_TOKEN, (torch.int64, num_tokens))
        of_seqs = dict.fromkeys(_NO_SEQUENCE, (torch.int32, num_seqs))
        starts = {"query_start": (torch.int32, num_seqs + 1), "logit_rows": (torch.int64, num_seqs)}
        slots = {"slots": (torch.int64, len(self._windows) * num_tokens), "adapter_slots": (torch.int32, num_tokens)}
        self._staging = Staging(of_tokens | slots | of_seqs | starts, device)
        self._arrivals = torch.zeros(num_seqs * model.num_heads, dtype=torch.int32, device=device)

    def send(self, chunks: list[Chunk], rows: list[int], shape: StepShape, late: Collection[int] = frozenset()) -> None:
        """Send a step to the device.

        rows    the row of each chunk's sequence
        late    chunks, by position, that choose no token though they sample
        shape   the step's layout; if it has room for more chunks than there are, then for more tokens, too
        """
        arrays = self._staging.fill()
        slots = arrays["slots"].reshape(-1, self._num_tokens)  # a view: the array is contiguous
        decodes = [index for index, chunk in enumerate(chunks) if chunk.length == 1 and chunk.samples]
        others = sorted({*range(len(chunks))}.difference(decodes)) if len(decodes) < len(chunks) else []
        self._fill_decodes(arrays, slots, [chunks[index] for index in decodes], [rows[index] for index in decodes])
        if shape.has_adapters:
            self._fill_adapters(arrays, chunks, shape)
        if late:
            arrays["sampled_rows"][: len(decodes)] = [-1 if index in late else rows[index] for index in decodes]
        end = len(decodes)
        for index in others:
            if (chunk := chunks[index]).drafts:
                drafted = slice(end, end := end + chunk.length)
                self._fill_tokens(arrays, slots, chunk, drafted)
                arrays["context_len"][drafted] = arrays["positions"][drafted] + 1
                arrays["rows"][drafted] = rows[index]
                arrays["sampled_rows"][drafted] = -1 if index in late else rows[index]
                arrays["ranks"][drafted] = np.arange(1, chunk.length + 1)
        _pad(arrays, slots, slice(end, shape.decodes), slice(end, shape.decodes))

        ends = arrays["query_start"][1 : shape.num_seqs + 1]
        ends[: shape.decodes] = np.arange(1, shape.decodes + 1)
        end = used = shape.decodes
        for index in others:
            if (chunk := chunks[index]).drafts:
                continue
            start, end = end, end + chunk.length
            ends[used] = end
            self._fill_tokens(arrays, slots, chunk, slice(start, end))
            arrays["context_len"][used], arrays["rows"][used] = chunk.end, rows[index]
            arrays["sampled_rows"][used] = rows[index] if chunk.samples and index not in late else -1
            arrays["ranks"][used] = 0
            used += 1
        _pad(arrays, slots, slice(end, shape.num_tokens), slice(used, shape.num_seqs))
        ends[used:] = end
        ends[-1] = shape.num_tokens
        arrays["logit_rows"][: shape.num_seqs] = np.maximum(ends - 1, 0)
        self._staging.send()

    def _fill_adapters(self, arrays: dict[str, np.ndarray], chunks: list[Chunk], shape: StepShape) -> None:
        arrays["adapter_slots"][: shape.num_tokens] = _NO_SLOT
        for chunk, token in zip(chunks, places_of(chunks, shape.decodes)[1], strict=True):
            arrays["adapter_slots"][token : token + chunk.length] = chunk.seq.adapter_slot

    def _fill_decodes(
        self, arrays: dict[str, np.ndarray], slots: np.ndarray, chunks: list[Chunk], rows: list[int]
    ) -> None:
        """Fill all at once: there may be hundreds in every step."""
        count, size = len(chunks), self._block_size
        starts = [chunk.start for chunk in chunks]
        arrays["tokens"][:count] = [known_token(chunk) for chunk in chunks]
        arrays["positions"][:count] = starts
        tables = [(chunk.seq.blocks, *chunk.seq.blocks.windows) for chunk in chunks]
        for of_group, group in zip(slots, zip(*tables, strict=True), strict=bool(tables)):
            of_group[:count] = [
                table[start // size] * size + start % size for table, start in zip(group, starts, strict=True)
            ]
        arrays["context_len"][:count] = arrays["positions"][:count] + 1
        arrays["rows"][:count] = arrays["sampled_rows"][:count] = rows
        arrays["ranks"][:count] = 0

    def _fill_tokens(self, arrays: dict[str, np.ndarray], slots: np.ndarray, chunk: Chunk, tokens: slice) -> None:
        known = chunk.tokens
        assert len(known) == chunk.length, "only a decode can start from a pending token"
        positions, size = np.arange(chunk.start, chunk.end), self._block_size
        first_block = chunk.start // size
        arrays["tokens"][tokens], arrays["positions"][tokens] = known, positions
        for of_group, table in zip(slots, (chunk.seq.blocks, *chunk.seq.blocks.windows), strict=True):
            blocks = np.array(table[first_block : -(-chunk.end // size)])
            of_group[tokens] = blocks[positions // size - first_block] * size + positions % size

    def of_model(self, shape: StepShape) -> StepInputs:
        """Return the model's inputs for the step that was sent last. Launches what puts unknown tokens in."""
        of_token = {name: self._staging.device[name][: shape.num_tokens] for name in _NO_TOKEN}
        if shape.decodes:
            tokens, rows = of_token["tokens"][: shape.decodes], self._staging.device["rows"][: shape.decodes]
            last = self._rows.sampling.last_token.index_select(0, rows.clamp(min=0))
            torch.where(tokens < 0, last, tokens, out=tokens)
        plan = AttentionPlan(
            query_start=self._staging.device["query_start"][: shape.num_seqs + 1],
            context_len=self._staging.device["context_len"][: shape.num_seqs],
            block_table=self._rows.block_tables[0],
            sliding_window=None,
            one_order=self._one_order,
            rows=self._staging.device["rows"][: shape.num_seqs],
            num_decodes=shape.decodes,
            arrivals=self._arrivals,
        )
        slots = self._staging.device["slots"].view(-1, self._num_tokens)[:, : shape.num_tokens]
        groups = [
            GroupInputs(of_group, {each: replace(plan, block_table=table, sliding_window=each) for each in windows})
            for of_group, table, windows in zip(slots, self._rows.block_tables, self._windows, strict=True)
        ]
        return StepInputs(
            token_ids=of_token["tokens"],
            positions=of_token["positions"],
            logit_rows=self._staging.device["logit_rows"][: shape.num_seqs] if shape.chunks else None,
            groups=groups,
            group_of=self._group_of,
            adapter_slots=self._staging.device["adapter_slots"][: shape.num_tokens] if shape.has_adapters else None,
        )

    def sampled_rows(self, shape: StepShape) -> Tensor:
        return self._staging.device["sampled_rows"][: shape.num_seqs]

    def verified(self, shape: StepShape) -> Verified:
        return Verified(self._staging.device["ranks"][: shape.num_seqs], self._staging.device["tokens"])

    def next_positions(self, shape: StepShape) -> Tensor:
        return self._staging.device["context_len"][: shape.num_seqs]


def places_of(chunks: list[Chunk], num_decodes: int) -> tuple[list[int], list[int]]:
    """Return each chunk's first entry, and its first token, among those of a step.

    num_decodes  of the step, drafts and padding included
    """
    is_plain = [chunk.length == 1 and chunk.samples for chunk in chunks]
    if all(is_plain):
        entries = tokens = list(range(len(chunks)))
        return entries, tokens
    decode, drafted = 0, sum(is_plain)
    entry = token = num_decodes
    entries, tokens = [], []
    for chunk, is_decode in zip(chunks, is_plain, strict=True):
        if is_decode:
            entries.append(decode)
            tokens.append(decode)
            decode += 1
        elif chunk.drafts:
            entries.append(drafted)
            tokens.append(drafted)
            drafted += chunk.length
        else:
            entries.append(entry)
            tokens.append(token)
            entry, token = entry + 1, token + chunk.length
    return entries, tokens


def known_token(chunk: Chunk) -> int:
    """Return the token at the start of a chunk; -1 if only the device knows it yet."""
    tokens = chunk.seq.tokens
    return tokens[chunk.start] if chunk.start < len(tokens) else -1


def _pad(arrays: dict[str, np.ndarray], slots: np.ndarray, tokens: slice, seqs: slice) -> None:
    slots[:, tokens] = _NO_SLOT
    for name, value in _NO_TOKEN.items():
        arrays[name][tokens] = value
    for name, value in _NO_SEQUENCE.items():
        arrays[name][seqs] = value
