"""A step's inputs on the device. Decodes and chunks of prompts have separate arrays, each sent in one copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pagoda_server.engine.core.step import Chunk
from pagoda_server.engine.models import StepInputs
from pagoda_server.engine.runners.cuda.rows import DeviceRows
from pagoda_server.engine.runners.cuda.staging import Staging
from pagoda_server.kernels import AttentionPlan


class DecodeInputs:
    """One token for each of up to `size` sequences. Rows that a step does not use are padding."""

    def __init__(
        self, size: int, rows: DeviceRows, block_size: int, windows: Iterable[int | None], device: torch.device
    ) -> None:
        self._rows, self._block_size, self._windows = rows, block_size, set(windows)
        wide, narrow = (torch.int64, size), (torch.int32, size)
        self._staging = Staging(
            {"tokens": wide, "positions": wide, "slots": wide, "rows": narrow, "context_len": narrow}, device
        )
        self._query_start = torch.arange(size + 1, dtype=torch.int32, device=device)

    def send(self, chunks: list[Chunk], rows: list[int], padded: int) -> None:
        """
        chunks  of one token each
        rows    the row of each chunk
        padded  how many rows the step has
        """
        arrays, count, size = self._staging.fill(), len(chunks), self._block_size
        starts = [chunk.start for chunk in chunks]
        arrays["tokens"][:count] = [known_token(chunk) for chunk in chunks]
        arrays["positions"][:count] = starts
        arrays["slots"][:count] = [
            chunk.seq.blocks[start // size] * size + start % size for chunk, start in zip(chunks, starts, strict=True)
        ]
        arrays["rows"][:count] = rows
        arrays["context_len"][:count] = arrays["positions"][:count] + 1
        for name, nothing in (("tokens", 0), ("positions", 0), ("slots", -1), ("rows", -1), ("context_len", 0)):
            arrays[name][count:padded] = nothing
        self._staging.send()

    def rows(self, padded: int) -> Tensor:
        return self._staging.device["rows"][:padded]

    def next_positions(self, padded: int) -> Tensor:
        return self._staging.device["context_len"][:padded]

    def inputs(self, padded: int) -> StepInputs:
        """Return the model's inputs, at the same addresses in every step.

        A token that the host does not know yet is the last token of its row.
        """
        fields = {name: field[:padded] for name, field in self._staging.device.items()}
        last = self._rows.sampling.last_token.index_select(0, fields["rows"].clamp(min=0))
        return StepInputs(
            token_ids=torch.where(fields["tokens"] < 0, last, fields["tokens"]),
            positions=fields["positions"],
            slots=fields["slots"],
            logit_rows=None,
            attention=plans_for(
                self._windows,
                AttentionPlan(
                    query_start=self._query_start[: padded + 1],
                    context_len=fields["context_len"],
                    block_table=self._rows.block_table,
                    sliding_window=None,
                    rows=fields["rows"],
                    num_decodes=padded,
                    max_query_len=1,
                ),
            ),
        )


class PromptInputs:
    """Chunks of prompts, of at most `num_seqs` sequences, with at most `num_tokens` tokens in total."""

    def __init__(
        self,
        num_tokens: int,
        num_seqs: int,
        rows: DeviceRows,
        block_size: int,
        windows: Iterable[int | None],
        device: torch.device,
    ) -> None:
        self._rows, self._block_size, self._windows = rows, block_size, set(windows)
        tokens, seqs = (torch.int64, num_tokens), (torch.int32, num_seqs)
        self._staging = Staging(
            {
                "tokens": tokens,
                "positions": tokens,
                "slots": tokens,
                "query_start": (torch.int32, num_seqs + 1),
                "context_len": seqs,
                "rows": seqs,
                "logit_rows": (torch.int64, num_seqs),
                "sampled_rows": seqs,
                "next_positions": seqs,
            },
            device,
        )
        self._num_sampling = 0

    def send(self, chunks: list[Chunk], rows: list[int]) -> StepInputs:
        """Send these chunks and return the model's inputs, with logits for chunks that sample."""
        arrays, size = self._staging.fill(), self._block_size
        sampled_rows: list[int] = []
        end = 0
        arrays["query_start"][0] = 0
        for at, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
            tokens = slice(end, end + chunk.length)
            end += chunk.length
            known = chunk.seq.tokens[chunk.start : chunk.end]
            assert len(known) == chunk.length, "only a decode can start from a pending token"
            positions = np.arange(chunk.start, chunk.end)
            first_block = chunk.start // size
            blocks = np.array(chunk.seq.blocks[first_block : -(-chunk.end // size)])
            arrays["tokens"][tokens], arrays["positions"][tokens] = known, positions
            arrays["slots"][tokens] = blocks[positions // size - first_block] * size + positions % size
            arrays["query_start"][at + 1], arrays["context_len"][at], arrays["rows"][at] = end, chunk.end, row
            if chunk.samples:
                arrays["logit_rows"][len(sampled_rows)] = end - 1
                arrays["next_positions"][len(sampled_rows)] = chunk.end
                sampled_rows.append(row)
        self._num_sampling = len(sampled_rows)
        arrays["sampled_rows"][: self._num_sampling] = sampled_rows
        self._staging.send()
        fields = self._staging.device
        return StepInputs(
            token_ids=fields["tokens"][:end],
            positions=fields["positions"][:end],
            slots=fields["slots"][:end],
            logit_rows=fields["logit_rows"][: self._num_sampling],
            attention=plans_for(
                self._windows,
                AttentionPlan(
                    query_start=fields["query_start"][: len(chunks) + 1],
                    context_len=fields["context_len"][: len(chunks)],
                    block_table=self._rows.block_table,
                    sliding_window=None,
                    rows=fields["rows"][: len(chunks)],
                    num_decodes=0,
                    max_query_len=max(chunk.length for chunk in chunks),
                ),
            ),
        )

    @property
    def sampled_rows(self) -> Tensor:
        return self._staging.device["sampled_rows"][: self._num_sampling]

    @property
    def next_positions(self) -> Tensor:
        return self._staging.device["next_positions"][: self._num_sampling]


def plans_for(windows: set[int | None], plan: AttentionPlan) -> dict[int | None, AttentionPlan]:
    """Return the same plan for each sliding window."""
    return {window: replace(plan, sliding_window=window) for window in windows}


def known_token(chunk: Chunk) -> int:
    """Return the token at the start of a chunk; -1 if only the device knows it yet."""
    tokens = chunk.seq.tokens
    return tokens[chunk.start] if chunk.start < len(tokens) else -1
